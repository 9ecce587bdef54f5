// Products of packed panels with a tile of quantized inputs, for ARM with or without dot products: a register holds a
// quarter of a panel's rows. The steps in floats are those of AVX2, so the bits are, too.
#pragma once

#include <arm_neon.h>

#include "formats.h"

namespace TM_NS {

using namespace mill;

constexpr int MAX_ROWS = 4;  // of a tile that are multiplied at once
constexpr int QUARTERS = 4;  // of a panel

// Whether the two halves of a group have scales and sums of their own.
template <class C>
constexpr int PARTS = C::SCALES == K_SIXTEENTHS ? 2 : 1;

template <int N>
struct Number {
    static constexpr int VALUE = N;
};

// Calls body with 0 to 3 as types: lanes and shifts of instructions are constants.
template <class Body>
static inline void four_times(Body body) {
    body(Number<0>{}), body(Number<1>{}), body(Number<2>{}), body(Number<3>{});
}

// The compiler would multiply in another order, keep codes and products until the end, and run out of registers.
template <class T>
static inline void now(T& sum) {
    __asm__("" : "+w"(sum));
}

// The fifth bits of a quarter's codes, which are the quarter's 16 bits of the word at `at`, are put to the others.
static inline uint8x16_t with_fifth(uint8x16_t codes, const uint8_t* at, int quarter) {
    const uint8x16_t spread = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t here = vaddq_u8(spread, vdupq_n_u8(static_cast<uint8_t>(2 * quarter)));
    const uint8x16_t word = vcombine_u8(vld1_u8(at), vdup_n_u8(0));
    return vbslq_u8(vdupq_n_u8(16), vtstq_u8(vqtbl1q_u8(word, here), bit), codes);
}

// The code vector j of a quarter, of codes of eight bits.
static inline int8x16_t signed_codes(const uint8_t* group, int quarter, int j) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(group + 64 * j + 16 * quarter), vdupq_n_u8(0x80)));
}

// The code vectors J and J + 4 of a quarter, signed where they have 8 bits; `group` is the group's first byte.
template <int BITS, int J>
static inline void unpack(const uint8_t* group, int quarter, int8x16_t& low, int8x16_t& high) {
    const uint8_t* const at = group + 16 * quarter;
    if constexpr (BITS == 8) {
        low = signed_codes(group, quarter, J);
        high = signed_codes(group, quarter, J + 4);
        return;
    }
    const uint8x16_t both = vld1q_u8(at + 64 * J);
    uint8x16_t first = vandq_u8(both, vdupq_n_u8(15)), second = vshrq_n_u8(both, 4);
    if constexpr (BITS == 5) {
        first = with_fifth(first, group + 256 + 8 * J, quarter);
        second = with_fifth(second, group + 256 + 8 * (J + 4), quarter);
    }
    if constexpr (BITS == 6) {
        const uint8x16_t two = vdupq_n_u8(48);
        const auto move = [](uint8x16_t four) {
            if constexpr (J == 3) return vshrq_n_u8(four, 2);
            if constexpr (J == 2) return four;
            return vshlq_n_u8(four, J < 2 ? 4 - 2 * J : 0);
        };
        first = vbslq_u8(two, move(vld1q_u8(at + 256)), first);
        second = vbslq_u8(two, move(vld1q_u8(at + 320)), second);
    }
    low = vreinterpretq_s8_u8(first);
    high = vreinterpretq_s8_u8(second);
}

// What the zero points add to the sum of a part: `minus` is minus the sum of its inputs. Codes of 8 bits have none left.
template <class C>
static inline int32x4_t zero_term(int32_t minus) {
    if constexpr (C::HAS_ZERO && C::BITS < 8) return vdupq_n_s32(minus * (1 << C::ZERO_SHIFT));
    return vdupq_n_s32(0);
}

template <class C>
static inline int32_t minus_of(const InputBlock& block, int part) {
    if (PARTS<C> == 1) return block.minus_sum;
    return part == 0 ? block.minus_half : block.minus_sum - block.minus_half;
}

}  // namespace TM_NS

#if TM_LEVEL >= TM_DOTPROD
#include "dots_dotprod.h"
#else
#include "dots_neon.h"
#endif

namespace TM_NS {

static inline float32x4_t halves(const uint8_t* at) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))); }

// COUNT quarters of sixteen small integers as floats.
template <bool SIGNED, int COUNT>
static inline void small(const uint8_t* at, float32x4_t out[COUNT]) {
    uint8x16_t bytes = vdupq_n_u8(0);
    if constexpr (COUNT == 4) {
        bytes = vld1q_u8(at);
    } else if constexpr (COUNT == 2) {
        bytes = vcombine_u8(vld1_u8(at), vdup_n_u8(0));
    } else {
        uint32_t four;
        __builtin_memcpy(&four, at, 4);
        bytes = vreinterpretq_u8_u32(vsetq_lane_u32(four, vdupq_n_u32(0), 0));
    }
#pragma GCC unroll 2
    for (int pair = 0; pair < (COUNT + 1) / 2; ++pair) {
        const uint8x8_t eight = pair ? vget_high_u8(bytes) : vget_low_u8(bytes);
        if constexpr (SIGNED) {
            const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(eight));
            out[2 * pair] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
            if constexpr (COUNT > 1) out[2 * pair + 1] = vcvtq_f32_s32(vmovl_high_s16(wide));
        } else {
            const uint16x8_t wide = vmovl_u8(eight);
            out[2 * pair] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
            if constexpr (COUNT > 1) out[2 * pair + 1] = vcvtq_f32_u32(vmovl_high_u16(wide));
        }
    }
}

// The scales of a group for COUNT quarters from `first` on, and beside them: what is added for the inputs' sum (with
// K_MINIMUM subtracted), or the scales of the group's second half.
template <class C, int COUNT>
struct GroupScales {
    float32x4_t scale[COUNT], other[COUNT];

    inline GroupScales(const uint8_t* chunk, int g, int first) {
        const uint8_t* at = chunk + 8 * first;
        const uint8_t* small_at = chunk + SMALL_AT + 4 * first;
        if constexpr (C::SCALES == K_MINIMUM) {
            small<false, COUNT>(small_at + g * PANEL, scale);
            small<false, COUNT>(small_at + (8 + g) * PANEL, other);
        }
        if constexpr (C::SCALES == K_SIXTEENTHS) {
            small<true, COUNT>(small_at + 2 * g * PANEL, scale);
            small<true, COUNT>(small_at + (2 * g + 1) * PANEL, other);
        }
#pragma GCC unroll 4
        for (int quarter = 0; quarter < COUNT; ++quarter) {
            float32x4_t d;
            if constexpr (C::FLOAT_D)
                d = vreinterpretq_f32_u8(vld1q_u8(chunk + 16 * (first + quarter)));
            else
                d = halves(at + 8 * quarter + (C::SCALES == SYMMETRIC ? 2 * PANEL * g : 0));
            if constexpr (C::SCALES <= MINIMUM) scale[quarter] = d;
            if constexpr (C::SCALES == MINIMUM) other[quarter] = halves(at + 2 * PANEL + 8 * quarter);
            if constexpr (C::SCALES >= K_MINIMUM) scale[quarter] = vmulq_f32(d, scale[quarter]);
            if constexpr (C::SCALES == K_MINIMUM)
                other[quarter] = vmulq_f32(halves(at + 2 * PANEL + 8 * quarter), other[quarter]);
            if constexpr (C::SCALES == K_SIXTEENTHS) other[quarter] = vmulq_f32(d, other[quarter]);
        }
    }
};

// Adds the sums of one quarter and row to its total.
template <class C>
static inline void add_sums(int32x4_t first, int32x4_t second, float32x4_t scale, float32x4_t other, const InputBlock& x,
                            float32x4_t& total) {
    if constexpr (C::SCALES == K_SIXTEENTHS) {
        const float32x4_t both = vfmaq_f32(vmulq_f32(vcvtq_f32_s32(second), other), vcvtq_f32_s32(first), scale);
        total = vfmaq_n_f32(total, both, x.d);
    } else {
        total = vfmaq_n_f32(total, vmulq_f32(vcvtq_f32_s32(first), scale), x.d);
        if constexpr (C::SCALES == MINIMUM) total = vfmaq_n_f32(total, other, x.sum);
        if constexpr (C::SCALES == K_MINIMUM) total = vfmsq_n_f32(total, other, x.sum);
    }
}

// Adds group g of a chunk to the totals of ROWS rows, [quarter][row]: as many quarters at once as sums fit in registers.
template <class C, int ROWS>
static inline void add_group(const uint8_t* chunk, int g, const InputBlock* blocks, float32x4_t totals[QUARTERS][ROWS]) {
    constexpr int COUNT = quarters_at_once<C>(ROWS);
    const uint8_t* const codes = chunk + C::SCALE_BYTES + g * C::GROUP_BYTES;
#pragma GCC unroll 4
    for (int first = 0; first < QUARTERS; first += COUNT) {
        // Inputs that are kept for the other quarters would not fit in the registers: the compiler must not know that they
        // are the same.
        if constexpr (COUNT < QUARTERS) __asm__("" : "+r"(blocks));
        int32x4_t sums[PARTS<C>][ROWS][COUNT];
        dots<C, ROWS, COUNT>(codes, first, blocks, sums);
        const GroupScales<C, COUNT> scales(chunk, g, first);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int quarter = 0; quarter < COUNT; ++quarter)
                add_sums<C>(sums[0][row][quarter], sums[PARTS<C> - 1][row][quarter], scales.scale[quarter],
                            scales.other[quarter], blocks[row], totals[first + quarter][row]);
    }
}

// The weights of one column in a quarter of the rows, without their minimums.
template <class C>
static inline float32x4_t weights_of(const uint8_t* panel, uint32_t group, uint32_t column, int quarter) {
    const uint32_t j = column / 4, byte = 8 * (column % 4);
    const uint8_t* at = panel + C::codes_at(group) + 16 * quarter;
    const auto bits = [byte](const uint8_t* words, uint32_t from, uint32_t mask) {
        const int32x4_t count = vdupq_n_s32(-static_cast<int32_t>(byte + from));
        return vandq_u32(vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(words)), count), vdupq_n_u32(mask));
    };
    uint32x4_t codes;
    if constexpr (C::BITS == 8) {
        codes = bits(at + 64 * j, 0, 255);
    } else {
        codes = bits(at + 64 * (j % 4), j & 4, 15);
        if constexpr (C::BITS == 5) {
            const uint8_t* fifth = panel + C::codes_at(group) + 256 + 8 * j + 2 * quarter;
            const int32_t from = static_cast<int32_t>(column % 4);
            const int32x4_t counts = {4 - from, -from, -4 - from, -8 - from};  // of bit 4 row + from, to the fifth place
            const uint32x4_t word = vdupq_n_u32(static_cast<uint32_t>(fifth[0] | fifth[1] << 8));
            codes = vorrq_u32(codes, vandq_u32(vshlq_u32(word, counts), vdupq_n_u32(16)));
        }
        if constexpr (C::BITS == 6)
            codes = vorrq_u32(codes, vshlq_n_u32(bits(at + 256 + 64 * (j / 4), 2 * (j % 4), 3), 4));
    }
    int32x4_t numbers = vreinterpretq_s32_u32(codes);
    if constexpr (C::HAS_ZERO) numbers = vsubq_s32(numbers, vdupq_n_s32(1 << C::ZERO_SHIFT));
    const GroupScales<C, 1> scales(panel + C::scales_at(group), static_cast<int>(group % C::CHUNK), quarter);
    const bool second = C::SCALES == K_SIXTEENTHS && j >= 4;
    return vmulq_f32(vcvtq_f32_s32(numbers), second ? scales.other[0] : scales.scale[0]);
}

// totals[quarter][row] = a panel times ROWS rows.
template <class C, int ROWS>
static inline void multiply(const uint8_t* panel, int64_t columns, const Rows& rows, float32x4_t totals[QUARTERS][ROWS]) {
    for (int quarter = 0; quarter < QUARTERS; ++quarter)
        for (int row = 0; row < ROWS; ++row) totals[quarter][row] = vdupq_n_f32(0);
    const uint8_t* at = panel;
    const InputBlock* blocks = rows.blocks;
    for (int64_t left = columns / GROUP; left > 0; left -= C::CHUNK) {
        if constexpr (ROWS <= 2) prefetch<C>(at);
        const int groups = left < C::CHUNK ? static_cast<int>(left) : C::CHUNK;
        for (int g = 0; g < groups; ++g) add_group<C, ROWS>(at, g, blocks + g * rows.stride, totals);
        at += C::CHUNK_BYTES;
        blocks += groups * rows.stride;
    }
    for (const Outlier* one = rows.outliers; one < rows.outliers + rows.taken[0]; ++one)
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
            const float32x4_t weights = weights_of<C>(panel, one->group, one->column, quarter);
            for (int row = 0; row < ROWS; ++row)
                totals[quarter][row] = vfmaq_n_f32(totals[quarter][row], weights, one->x[rows.first + row]);
        }
}

// Writes sums to the rows of `out`, `width` columns of them. They go through memory here, whole: where it depended on a
// width which of them is written, the compiler would keep all of them in memory while they are added to.
template <int COUNT, int ROWS>
__attribute__((always_inline)) static inline void put_all(const float32x4_t (&sums)[COUNT][ROWS], float* out,
                                                          int64_t out_stride, int64_t width, const float* bias) {
    float rows[ROWS][4 * COUNT];
#pragma GCC unroll 16
    for (int quarter = 0; quarter < COUNT; ++quarter)
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) vst1q_f32(rows[row] + 4 * quarter, sums[quarter][row]);
    for (int row = 0; row < ROWS; ++row, out += out_stride) {
        int64_t column = 0;
        for (; column + 4 <= width; column += 4) {
            const float32x4_t four = vld1q_f32(rows[row] + column);
            vst1q_f32(out + column, bias ? vaddq_f32(four, vld1q_f32(bias + column)) : four);
        }
        for (; column < width; ++column) out[column] = bias ? rows[row][column] + bias[column] : rows[row][column];
    }
}

template <class C, int ROWS>
static void product(const uint8_t* panel, int64_t columns, const Rows& rows, float* out, int64_t out_stride, int width,
                    const float* bias) {
    float32x4_t totals[QUARTERS][ROWS];
    multiply<C, ROWS>(panel, columns, rows, totals);
    put_all(totals, out, out_stride, width, bias);
}

// Two quarters of a column.
struct DenseF32 {
    static constexpr int BYTES = 4;
    static inline void load(const uint8_t* at, float32x4_t weights[2]) {
        for (int i = 0; i < 2; ++i) weights[i] = vreinterpretq_f32_u8(vld1q_u8(at + 16 * i));
    }
};
struct DenseF16 {
    static constexpr int BYTES = 2;
    static inline void load(const uint8_t* at, float32x4_t weights[2]) {
        const float16x8_t both = vreinterpretq_f16_u8(vld1q_u8(at));
        weights[0] = vcvt_f32_f16(vget_low_f16(both));
        weights[1] = vcvt_high_f32_f16(both);
    }
};
struct DenseBF16 {
    static constexpr int BYTES = 2;
    static inline void load(const uint8_t* at, float32x4_t weights[2]) {
        const uint16x8_t both = vreinterpretq_u16_u8(vld1q_u8(at)), zero = vdupq_n_u16(0);
        weights[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, both));
        weights[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, both));
    }
};

constexpr int DENSE_ROWS = 6;  // of a tile, that dense panels are multiplied with at once: 24 of the 32 registers are sums

// Panels that so many rows take at once: a sum waits for its last addition, and meanwhile others are added to.
constexpr int dense_panels(int rows) { return rows <= 4 ? 4 / rows : 1; }

// PANELS dense panels, which are `apart` bytes from each other, times ROWS rows: x is [columns][stride] floats, one column
// of the tile after the other. Every output is one sum over the columns in their order.
template <class D, int ROWS, int PANELS>
static void product_dense(const uint8_t* panels, int64_t apart, int64_t columns, const float* x, int64_t stride, float* out,
                          int64_t out_stride, int64_t width, const float* bias) {
    float32x4_t sums[QUARTERS * PANELS][ROWS];
    for (int quarter = 0; quarter < QUARTERS * PANELS; ++quarter)
        for (int row = 0; row < ROWS; ++row) sums[quarter][row] = vdupq_n_f32(0);
    for (int64_t k = 0; k < columns; ++k) {
#pragma GCC unroll 16
        for (int quarter = 0; quarter < QUARTERS * PANELS; quarter += 2) {
            float32x4_t weights[2];
            D::load(panels + quarter / QUARTERS * apart + quarter % QUARTERS * 4 * D::BYTES, weights);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i)
#pragma GCC unroll 6
                for (int row = 0; row < ROWS; ++row)
                    sums[quarter + i][row] = vfmaq_n_f32(sums[quarter + i][row], weights[i], x[row]);
        }
        panels += D::BYTES * PANEL;
        x += stride;
    }
    put_all(sums, out, out_stride, width, bias);
}

// The 32 inputs of a block.
struct Values {
    float32x4_t part[8];

    explicit inline Values(const float* x) {
        for (int i = 0; i < 8; ++i) part[i] = vld1q_f32(x + 4 * i);
    }

    // The largest magnitude; not finite if one of them is not.
    inline float largest() const {
        float32x4_t top = vabsq_f32(part[0]);
        for (int i = 1; i < 8; ++i) top = vmaxq_f32(top, vabsq_f32(part[i]));
        return vmaxvq_f32(top);
    }

    // Makes the first value of this magnitude zero; returns where it is.
    inline int drop(float size) {
        uint32x4_t first = vdupq_n_u32(GROUP);
        const uint32x4_t lanes = {0, 1, 2, 3};
        for (int i = 0; i < 8; ++i) {
            const uint32x4_t other = vmvnq_u32(vceqq_f32(vabsq_f32(part[i]), vdupq_n_f32(size)));
            first = vminq_u32(first, vorrq_u32(vaddq_u32(lanes, vdupq_n_u32(static_cast<uint32_t>(4 * i))), other));
        }
        const uint32_t place = vminvq_u32(first);
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32x4_t here = vceqq_u32(lanes, vdupq_n_u32(place - 4 * i));
            part[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(part[i]), here));
        }
        return static_cast<int>(place);
    }

    // Rounds a half; returns the sum of its codes.
    inline int round(int half, float inverse, int8_t* q) const {
        int16x8_t words[2];
        for (int i = 0; i < 2; ++i) {
            const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(part[4 * half + 2 * i], inverse));
            const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(part[4 * half + 2 * i + 1], inverse));
            words[i] = vcombine_s16(vmovn_s32(low), vmovn_s32(high));
        }
        const int8x16_t codes = vcombine_s8(vmovn_s16(words[0]), vmovn_s16(words[1]));
        vst1q_s8(q, codes);
        return vaddlvq_s8(codes);
    }
};

}  // namespace TM_NS
