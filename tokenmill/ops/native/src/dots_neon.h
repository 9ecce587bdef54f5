// Sums of products of codes with inputs, for any ARM CPU of 64 bits: products are added in 16 bits as long as they fit, each
// column of four by itself, then in 32.
//
// Included by matrix_neon.h, which has unpack() and zero_term().
#pragma once

#include <arm_neon.h>

#include "formats.h"

namespace TM_NS {

// Half of the registers are sums, of which a quarter has two.
template <class C>
constexpr int quarters_at_once(int rows) {
    const int most = 8 / (rows * PARTS<C>);
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Four inputs of a row, beside each of four rows of codes.
static inline int8x16_t four_inputs(const int8_t* q) {
    int32_t word;
    __builtin_memcpy(&word, q, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

// The sums of a quarter's first two rows and of its other two, by column of four.
struct Pair {
    int16x8_t low, high;

    inline void set(int8x16_t codes, int8x16_t x) {
        low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
        high = vmull_high_s8(codes, x);
    }
    inline void add(int8x16_t codes, int8x16_t x) {
        low = vmlal_s8(low, vget_low_s8(codes), vget_low_s8(x));
        high = vmlal_high_s8(high, codes, x);
    }
};

// What codes of BITS bits give at most is in 16 bits the sum of: a whole group, for each column of four, with up to 5 bits;
// with 6 bits half a group; with 8 bits two products.
template <class C, int ROWS, int COUNT>
static inline void dots(const uint8_t* at, const uint8_t* fifth, const InputBlock* blocks,
                        int32x4_t sums[PARTS<C>][ROWS][COUNT]) {
    constexpr int PARTS_16 = C::BITS == 4 || C::BITS == 5 ? PARTS<C> : 2;
    static_assert(C::BITS != 6 || PARTS<C> == 2, "the whole group's would not fit");
    Pair pairs[PARTS_16][ROWS][COUNT];
    int32x4_t wide[PARTS<C>][ROWS][COUNT][2];  // with 8 bits: of two columns of four each
    four_times([&](auto j) __attribute__((always_inline)) {
        constexpr int J = decltype(j)::VALUE;
#pragma GCC unroll 4
        for (int quarter = 0; quarter < COUNT; ++quarter) {
            int8x16_t codes[2];
            unpack<C::BITS, J>(at + 16 * quarter, fifth + 2 * quarter, codes[0], codes[1]);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const int8x16_t x = four_inputs(blocks[row].q + 16 * half + 4 * J);
                    Pair& pair = pairs[half < PARTS_16 ? half : 0][row][quarter];
                    constexpr bool EIGHT = C::BITS == 8;
                    if ((J == 0 || (EIGHT && J == 2)) && half < PARTS_16)
                        pair.set(codes[half], x);
                    else
                        pair.add(codes[half], x);
                    if constexpr (EIGHT && J % 2 == 1) {
                        int32x4_t* const two = wide[half < PARTS<C> ? half : 0][row][quarter];
                        const bool begins = J == 1 && half < PARTS<C>;
                        two[0] = begins ? vpaddlq_s16(pair.low) : vpadalq_s16(two[0], pair.low);
                        two[1] = begins ? vpaddlq_s16(pair.high) : vpadalq_s16(two[1], pair.high);
                    }
                }
        }
    });
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS<C>; ++part) {
            const int32x4_t zero = zero_term<C>(minus_of<C>(blocks[row], part));
#pragma GCC unroll 4
            for (int quarter = 0; quarter < COUNT; ++quarter) {
                const Pair& pair = pairs[part][row][quarter];
                int32x4_t& sum = sums[part][row][quarter];
                if constexpr (C::BITS == 8)
                    sum = vpaddq_s32(wide[part][row][quarter][0], wide[part][row][quarter][1]);
                else if constexpr (C::BITS == 4)  // two columns fit, too
                    sum = vpadalq_s16(zero, vpaddq_s16(pair.low, pair.high));
                else
                    sum = vaddq_s32(zero, vpaddq_s32(vpaddlq_s16(pair.low), vpaddlq_s16(pair.high)));
            }
        }
}

}  // namespace TM_NS
