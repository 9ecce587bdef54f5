// Blocks of GGUF formats as floats, and the formats by their numbers.
#pragma once

#include "gguf_blocks.h"

namespace mill {
namespace TM_NS {

struct Wide {};  // in the place of a form

template <class C>
constexpr bool IS_WIDE = false;
template <>
inline constexpr bool IS_WIDE<Wide> = true;

struct Q2_K {  // two bits, with a scale and a minimum of four bits for every 16 values
    using C = Wide;
    static constexpr int VALUES = 256, BYTES = 84;
    static inline void floats(const uint8_t* from, float* out) {
        const float d = half_at(from + 80), dmin = half_at(from + 82);
        for (int g = 0; g < 16; ++g) {
            const float scale = d * static_cast<float>(from[g] & 15), minimum = dmin * static_cast<float>(from[g] >> 4);
            const uint8_t* two = from + 16 + 32 * (g / 8) + 16 * (g % 2);
            const int shift = 2 * (g / 2 % 4);
            for (int i = 0; i < 16; ++i) out[16 * g + i] = scale * static_cast<float>(two[i] >> shift & 3) - minimum;
        }
    }
};

// Floats of four bits, times two.
constexpr float FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct MXFP4 {
    using C = Wide;
    static constexpr int VALUES = 32, BYTES = 17;
    static inline void floats(const uint8_t* from, float* out) {
        const uint32_t e = from[0];  // of a power of two, half of which is a subnormal where e < 2
        const float d = bits_to_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        for (int i = 0; i < 16; ++i) {
            out[i] = d * FP4[from[1 + i] & 15];
            out[16 + i] = d * FP4[from[1 + i] >> 4];
        }
    }
};

struct NVFP4 {
    using C = Wide;
    static constexpr int VALUES = 64, BYTES = 36;
    static inline float half_of(uint32_t scale) {  // half of a float of four bits of exponent and three of fraction
        const uint32_t exponent = scale >> 3 & 15, fraction = scale & 7;
        if (scale == 0x7f) return 0;
        if (exponent == 0) return static_cast<float>(fraction) * 0x1p-10f;
        return bits_to_float((exponent + 119) << 23 | fraction << 20);
    }
    static inline void floats(const uint8_t* from, float* out) {
        for (int g = 0; g < 4; ++g) {
            const float d = half_of(from[g]);
            for (int i = 0; i < 8; ++i) {
                out[16 * g + i] = d * FP4[from[4 + 8 * g + i] & 15];
                out[16 * g + 8 + i] = d * FP4[from[4 + 8 * g + i] >> 4];
            }
        }
    }
};

constexpr int64_t GGUF_F32 = 0, GGUF_F16 = 1, GGUF_BF16 = 30;  // not in blocks

// Calls visit(format) with the type of a format in blocks; false: there is none with this number.
template <class Visit>
static inline bool with_format(int64_t number, Visit visit) {
    switch (number) {
        case 2: visit(Q4_0{}); return true;
        case 3: visit(Q4_1{}); return true;
        case 6: visit(Q5_0{}); return true;
        case 7: visit(Q5_1{}); return true;
        case 8: visit(Q8_0{}); return true;
        case 10: visit(Q2_K{}); return true;
        case 11: visit(Q3_K{}); return true;
        case 12: visit(Q4_K{}); return true;
        case 13: visit(Q5_K{}); return true;
        case 14: visit(Q6_K{}); return true;
        case 16: visit(IQ2_XXS{}); return true;
        case 17: visit(IQ2_XS{}); return true;
        case 18: visit(IQ3_XXS{}); return true;
        case 19: visit(IQ1_S{}); return true;
        case 20: visit(IQ4_NL{}); return true;
        case 21: visit(IQ3_S{}); return true;
        case 22: visit(IQ2_S{}); return true;
        case 23: visit(IQ4_XS{}); return true;
        case 29: visit(IQ1_M{}); return true;
        case 34: visit(TQ1_0{}); return true;
        case 35: visit(TQ2_0{}); return true;
        case 39: visit(MXFP4{}); return true;
        case 40: visit(NVFP4{}); return true;
        default: return false;
    }
}

// `count` values that share a scale.
template <int COUNT>
static inline void scaled(const uint8_t* codes, int zero, float scale, float minimum, float* out) {
    for (int i = 0; i < COUNT; ++i) out[i] = scale * static_cast<float>(codes[i] - zero) + minimum;
}

template <int COUNT>
static inline void scaled(const uint8_t* codes, int zero, float scale, float* out) {
    for (int i = 0; i < COUNT; ++i) out[i] = scale * static_cast<float>(codes[i] - zero);
}

// Once for both who read blocks: a call costs little, and compiling it twice much.
template <class F>
__attribute__((noinline)) static void read_block(const uint8_t* from, const uint8_t* book, Block& out) {
    F::read(from, book, out);
}

template <class F>
static inline void floats_of(const uint8_t* from, const uint8_t* book, float* out) {
    using C = typename F::C;
    if constexpr (IS_WIDE<C>) {
        F::floats(from, out);
    } else {
        constexpr int ZERO = C::HAS_ZERO ? 1 << C::ZERO_SHIFT : 0;
        Block block;
        read_block<F>(from, book, block);
        if constexpr (C::SCALES == SYMMETRIC) {
            scaled<F::VALUES>(block.codes, ZERO, half_to_float(block.d), out);
        } else if constexpr (C::SCALES == MINIMUM) {
            scaled<F::VALUES>(block.codes, ZERO, half_to_float(block.d), half_to_float(block.min), out);
        } else if constexpr (C::SCALES == K_MINIMUM) {
            const float d = half_to_float(block.d), dmin = -half_to_float(block.min);
            for (int g = 0; g < 8; ++g)
                scaled<32>(block.codes + 32 * g, ZERO, d * static_cast<float>(block.scale[g]),
                           dmin * static_cast<float>(block.low[g]), out + 32 * g);
        } else {
            float d = block.wide_d;
            if constexpr (!C::FLOAT_D) d = half_to_float(block.d);
            for (int g = 0; g < 16; ++g)
                scaled<16>(block.codes + 16 * g, ZERO, d * static_cast<float>(static_cast<int8_t>(block.scale[g])),
                           out + 16 * g);
        }
    }
}

template <class F>
static void floats_of_blocks(const uint8_t* from, const uint8_t* book, int64_t count, float* out) {
    for (int64_t b = 0; b < count; ++b) floats_of<F>(from + b * F::BYTES, book, out + b * F::VALUES);
}

}  // namespace TM_NS
}  // namespace mill
