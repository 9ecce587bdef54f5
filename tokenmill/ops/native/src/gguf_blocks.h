// The block formats of GGUF: what a block of a file means, in the terms of the form that panels hold it in.
//
// A format says which form keeps it exactly, and reads a block as that form's unsigned codes and scales. Floats follow from
// those: products of the few bits of a scale and a code are exact in float32, so they are the same at every level, and
// what the format's own definition gives. Formats that no form keeps are read as floats (WIDE).
// Bytes are read as little-endian machines have them.
#pragma once

#include "formats.h"
#include "half.h"
#include "ops.h"

namespace mill {
namespace TM_NS {

struct Block {
    alignas(64) uint8_t codes[SUPER];
    float wide_d;               // of INT8_K
    uint16_t d, min;            // f16 bits
    uint8_t scale[16], low[8];  // of groups within 256
};

static inline uint32_t read32(const uint8_t* at) {
    uint32_t value;
    __builtin_memcpy(&value, at, 4);
    return value;
}

static inline uint64_t read64(const uint8_t* at) {
    uint64_t value;
    __builtin_memcpy(&value, at, 8);
    return value;
}

constexpr uint64_t BYTES_OF_ONE = 0x0101010101010101ull;

// Eight signed bytes as codes of eight bits.
static inline void put_eight(uint64_t eight, uint8_t* codes) {
    eight ^= 0x80 * BYTES_OF_ONE;
    __builtin_memcpy(codes, &eight, 8);
}

// Eight positive bytes, negated where their bit is set.
static inline uint64_t with_signs(uint64_t eight, uint32_t signs) {
    const uint64_t bits = signs * BYTES_OF_ONE & 0x8040201008040201ull;    // bit i in byte i
    const uint64_t ones = (bits + 0x7f * BYTES_OF_ONE) >> 7 & BYTES_OF_ONE;  // 1 in such a byte
    return (eight ^ ones * 255) + ones;
}

// Seven signs; the eighth makes their number even.
static inline uint32_t even_signs(uint32_t seven) {
    seven &= 127;
    return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7;
}

static inline void nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[i] & 15;
        codes[16 + i] = from[i] >> 4;
    }
}

static inline void add_fifth(const uint8_t* bits, uint8_t* codes) {
    const uint32_t all = read32(bits);
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((all >> i & 1) << 4);
}

struct Q4_0 {
    using C = Int4;
    static constexpr int VALUES = 32, BYTES = 18;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        nibbles(from + 2, out.codes);
    }
};

struct Q4_1 {
    using C = Int4Min;
    static constexpr int VALUES = 32, BYTES = 20;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        out.min = read16(from + 2);
        nibbles(from + 4, out.codes);
    }
};

struct Q5_0 {
    using C = Int5;
    static constexpr int VALUES = 32, BYTES = 22;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        nibbles(from + 6, out.codes);
        add_fifth(from + 2, out.codes);
    }
};

struct Q5_1 {
    using C = Int5Min;
    static constexpr int VALUES = 32, BYTES = 24;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        out.min = read16(from + 2);
        nibbles(from + 8, out.codes);
        add_fifth(from + 4, out.codes);
    }
};

struct Q8_0 {
    using C = Int8;
    static constexpr int VALUES = 32, BYTES = 34;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        for (int i = 0; i < 32; ++i) out.codes[i] = from[2 + i] ^ 0x80;
    }
};

// The 6-bit scales and minimums of Q4_K and Q5_K.
static inline void k_scales(const uint8_t* s, Block& out) {
    for (int j = 0; j < 4; ++j) {
        out.scale[j] = s[j] & 63;
        out.low[j] = s[j + 4] & 63;
        out.scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
        out.low[j + 4] = static_cast<uint8_t>(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
    }
}

struct Q4_K {
    using C = Int4K;
    static constexpr int VALUES = 256, BYTES = 144;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        out.min = read16(from + 2);
        k_scales(from + 4, out);
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 32; ++i) {
                const uint8_t byte = from[16 + 32 * j + i];
                out.codes[64 * j + i] = byte & 15;
                out.codes[64 * j + 32 + i] = byte >> 4;
            }
    }
};

struct Q5_K {
    using C = Int5K;
    static constexpr int VALUES = 256, BYTES = 176;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        out.min = read16(from + 2);
        k_scales(from + 4, out);
        const uint8_t* fifth = from + 16;
        for (int j = 0; j < 4; ++j)
            for (int i = 0; i < 32; ++i) {
                const uint8_t byte = from[48 + 32 * j + i];
                out.codes[64 * j + i] = static_cast<uint8_t>((byte & 15) | (fifth[i] >> 2 * j & 1) << 4);
                out.codes[64 * j + 32 + i] = static_cast<uint8_t>(byte >> 4 | (fifth[i] >> (2 * j + 1) & 1) << 4);
            }
    }
};

struct Q6_K {
    using C = Int6K;
    static constexpr int VALUES = 256, BYTES = 210;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from + 208);
        __builtin_memcpy(out.scale, from + 192, 16);
        for (int half = 0; half < 2; ++half) {
            const uint8_t *low = from + 64 * half, *high = from + 128 + 32 * half;
            uint8_t* codes = out.codes + 128 * half;
            for (int i = 0; i < 32; ++i) {
                codes[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
                codes[32 + i] = static_cast<uint8_t>((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
                codes[64 + i] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
                codes[96 + i] = static_cast<uint8_t>(low[32 + i] >> 4 | (high[i] >> 6) << 4);
            }
        }
    }
};

struct Q3_K {  // three bits, of which the third is stored by itself
    using C = Int6K;
    static constexpr int VALUES = 256, BYTES = 110;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from + 108);
        const uint8_t *third = from, *scales = from + 96;
        for (int i = 0; i < 16; ++i) {
            const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4, high = scales[8 + i % 4] >> 2 * (i / 4) & 3;
            out.scale[i] = static_cast<uint8_t>((low | high << 4) - 32);
        }
        for (int j = 0; j < 8; ++j) {
            const uint8_t* two = from + 32 + 32 * (j / 4);
            for (int i = 0; i < 32; ++i)
                out.codes[32 * j + i] = static_cast<uint8_t>(28 + (two[i] >> 2 * (j % 4) & 3) + (third[i] >> j & 1) * 4);
        }
    }
};

// The numbers that a code of four bits stands for, as codes of eight.
constexpr uint8_t NONLINEAR[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

static inline void nonlinear(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = NONLINEAR[from[i] & 15];
        codes[16 + i] = NONLINEAR[from[i] >> 4];
    }
}

struct IQ4_NL {
    using C = Int8;
    static constexpr int VALUES = 32, BYTES = 18;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from);
        nonlinear(from + 2, out.codes);
    }
};

struct IQ4_XS {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 136;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.wide_d = half_at(from);
        const int high = read16(from + 2);
        for (int g = 0; g < 8; ++g) {
            const int scale = (from[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4;
            out.scale[2 * g] = out.scale[2 * g + 1] = static_cast<uint8_t>(scale - 32);
            nonlinear(from + 8 + 16 * g, out.codes + 32 * g);
        }
    }
};

// Scales of four bits, of 16 values each: odd numbers.
static inline void odd_scales(const uint8_t* eight, Block& out) {
    for (int i = 0; i < 8; ++i) {
        out.scale[2 * i] = static_cast<uint8_t>(2 * (eight[i] & 15) + 1);
        out.scale[2 * i + 1] = static_cast<uint8_t>(2 * (eight[i] >> 4) + 1);
    }
}

// From here on most formats take eight or four values at a time from a book of them.
struct IQ2_XXS {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 66;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        out.wide_d = half_at(from) * 0.125f;
        for (int g = 0; g < 8; ++g) {
            const uint8_t* pages = from + 2 + 8 * g;
            const uint32_t rest = read32(pages + 4);
            out.scale[2 * g] = out.scale[2 * g + 1] = static_cast<uint8_t>(2 * (rest >> 28) + 1);
            for (int k = 0; k < 4; ++k)
                put_eight(with_signs(read64(book + 8 * pages[k]), even_signs(rest >> 7 * k)), out.codes + 32 * g + 8 * k);
        }
    }
};

struct IQ2_XS {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 74;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        out.wide_d = half_at(from) * 0.125f;
        odd_scales(from + 66, out);
        for (int k = 0; k < 32; ++k) {
            const uint32_t one = read16(from + 2 + 2 * k);
            put_eight(with_signs(read64(book + 8 * (one & 511)), even_signs(one >> 9)), out.codes + 8 * k);
        }
    }
};

struct IQ2_S {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 82;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        out.wide_d = half_at(from) * 0.125f;
        odd_scales(from + 74, out);
        for (int k = 0; k < 32; ++k) {
            const int page = from[2 + k] | (from[66 + k / 4] >> 2 * (k % 4) & 3) << 8;
            put_eight(with_signs(read64(book + 8 * page), from[34 + k]), out.codes + 8 * k);
        }
    }
};

struct IQ3_XXS {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 98;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        out.wide_d = half_at(from) * 0.25f;
        for (int g = 0; g < 8; ++g) {
            const uint8_t* pages = from + 2 + 8 * g;
            const uint32_t rest = read32(from + 66 + 4 * g);
            out.scale[2 * g] = out.scale[2 * g + 1] = static_cast<uint8_t>(2 * (rest >> 28) + 1);
            for (int k = 0; k < 4; ++k) {
                const uint64_t eight = read32(book + 4 * pages[2 * k]) | uint64_t(read32(book + 4 * pages[2 * k + 1])) << 32;
                put_eight(with_signs(eight, even_signs(rest >> 7 * k)), out.codes + 32 * g + 8 * k);
            }
        }
    }
};

struct IQ3_S {
    using C = Int6K;
    static constexpr int VALUES = 256, BYTES = 110;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        out.d = read16(from);
        for (int g = 0; g < 8; ++g) {
            const int scale = from[106 + g / 2] >> 4 * (g % 2) & 15;
            out.scale[2 * g] = out.scale[2 * g + 1] = static_cast<uint8_t>(2 * scale + 1);
            const uint32_t ninth = from[66 + g];
            for (int k = 0; k < 4; ++k) {
                const uint8_t* pages = from + 2 + 8 * g + 2 * k;
                const uint32_t first = pages[0] | (ninth >> 2 * k & 1) << 8, second = pages[1] | (ninth >> (2 * k + 1) & 1) << 8;
                const uint64_t eight = read32(book + 4 * first) | uint64_t(read32(book + 4 * second)) << 32;
                const uint64_t plus_128 = with_signs(eight, from[74 + 4 * g + k]) ^ 0x80 * BYTES_OF_ONE;
                const uint64_t moved = plus_128 - 96 * BYTES_OF_ONE;  // numbers are above -16: no byte borrows
                __builtin_memcpy(out.codes + 32 * g + 8 * k, &moved, 8);
            }
        }
    }
};

// Eight of -8, 0 and 8 from the book, each with 1 added or taken away.
static inline void ternary_eight(const uint8_t* book, uint32_t page, bool less, uint8_t* codes) {
    const uint64_t eight = read64(book + 8 * page) ^ 0x80 * BYTES_OF_ONE;  // 120, 128, 136: nothing is carried
    const uint64_t moved = less ? eight - BYTES_OF_ONE : eight + BYTES_OF_ONE;
    __builtin_memcpy(codes, &moved, 8);
}

struct IQ1_S {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 50;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        out.wide_d = half_at(from) * 0.125f;
        for (int g = 0; g < 8; ++g) {
            const uint32_t rest = read16(from + 34 + 2 * g);
            out.scale[2 * g] = out.scale[2 * g + 1] = static_cast<uint8_t>(2 * (rest >> 12 & 7) + 1);
            for (int k = 0; k < 4; ++k)
                ternary_eight(book, from[2 + 4 * g + k] | (rest >> 3 * k & 7) << 8, rest >> 15, out.codes + 32 * g + 8 * k);
        }
    }
};

struct IQ1_M {
    using C = Int8K;
    static constexpr int VALUES = 256, BYTES = 56;
    static inline void read(const uint8_t* from, const uint8_t* book, Block& out) {
        uint32_t d = 0;
        for (int i = 0; i < 4; ++i) {
            const uint32_t four = read16(from + 48 + 2 * i);
            d |= (four >> 12) << 4 * i;
            for (int k = 0; k < 4; ++k) out.scale[4 * i + k] = static_cast<uint8_t>(2 * (four >> 3 * k & 7) + 1);
        }
        out.wide_d = half_to_float(static_cast<uint16_t>(d)) * 0.125f;
        for (int k = 0; k < 32; ++k) {
            const uint32_t rest = from[32 + k / 2] >> 4 * (k % 2);
            ternary_eight(book, from[k] | (rest & 7) << 8, rest & 8, out.codes + 8 * k);
        }
    }
};

struct TQ1_0 {  // five numbers of three values each in a byte, as digits of a fraction
    using C = Int4;
    static constexpr int VALUES = 256, BYTES = 54;
    static inline void digits(const uint8_t* from, int count, int powers, uint8_t* codes) {
        for (int n = 0, power = 1; n < powers; ++n, power *= 3)
            for (int i = 0; i < count; ++i)
                codes[n * count + i] = static_cast<uint8_t>(7 + (static_cast<uint8_t>(from[i] * power) * 3 >> 8));
    }
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from + 52);
        digits(from, 32, 5, out.codes);
        digits(from + 32, 16, 5, out.codes + 160);
        digits(from + 48, 4, 4, out.codes + 240);
    }
};

struct TQ2_0 {
    using C = Int4;
    static constexpr int VALUES = 256, BYTES = 66;
    static inline void read(const uint8_t* from, const uint8_t*, Block& out) {
        out.d = read16(from + 64);
        for (int j = 0; j < 8; ++j)
            for (int i = 0; i < 32; ++i)
                out.codes[32 * j + i] = static_cast<uint8_t>(7 + (from[32 * (j / 4) + i] >> 2 * (j % 4) & 3));
    }
};

}  // namespace TM_NS
}  // namespace mill
