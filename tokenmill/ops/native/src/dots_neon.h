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

// What codes of up to 6 bits give fits in 16 bits: of a whole group, for each column of four; with 6 bits of half a group.
template <class C, int ROWS, int COUNT>
static inline void dots_of_few_bits(const uint8_t* group, int from, const InputBlock* blocks,
                                    int32x4_t sums[PARTS<C>][ROWS][COUNT]) {
    static_assert(C::BITS <= 5 || PARTS<C> == 2, "the whole group's would not fit");
    Pair pairs[PARTS<C>][ROWS][COUNT];
    four_times([&](auto j) __attribute__((always_inline)) {
        constexpr int J = decltype(j)::VALUE;
#pragma GCC unroll 4
        for (int quarter = 0; quarter < COUNT; ++quarter) {
            int8x16_t codes[2];
            unpack<C::BITS, J>(group, from + quarter, codes[0], codes[1]);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const int8x16_t x = four_inputs(blocks[row].q + 16 * half + 4 * J);
                    Pair& pair = pairs[half < PARTS<C> ? half : 0][row][quarter];
                    if (J == 0 && half < PARTS<C>)
                        pair.set(codes[half], x);
                    else
                        pair.add(codes[half], x);
                    if (ROWS > 2) now(pair.low), now(pair.high);
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
                if constexpr (C::BITS == 4)  // two columns of four fit, too
                    sum = vpadalq_s16(zero, vpaddq_s16(pair.low, pair.high));
                else
                    sum = vaddq_s32(zero, vpaddq_s32(vpaddlq_s16(pair.low), vpaddlq_s16(pair.high)));
            }
        }
}

// Of codes of eight bits, two products fit.
template <class C, int ROWS, int COUNT>
static inline void dots_of_eight_bits(const uint8_t* group, int from, const InputBlock* blocks,
                                      int32x4_t sums[PARTS<C>][ROWS][COUNT]) {
    int32x4_t wide[PARTS<C>][ROWS][COUNT][2];  // of two columns of four each
    four_times([&](auto step) __attribute__((always_inline)) {
        constexpr int J = 2 * decltype(step)::VALUE, PART = PARTS<C> == 2 ? J / 4 : 0;
        constexpr bool BEGINS = J == 4 * PART;
#pragma GCC unroll 4
        for (int quarter = 0; quarter < COUNT; ++quarter) {
            const int8x16_t first = signed_codes(group, from + quarter, J), second = signed_codes(group, from + quarter, J + 1);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row) {
                Pair pair;
                pair.set(first, four_inputs(blocks[row].q + 4 * J));
                pair.add(second, four_inputs(blocks[row].q + 4 * J + 4));
                int32x4_t* const two = wide[PART][row][quarter];
                two[0] = BEGINS ? vpaddlq_s16(pair.low) : vpadalq_s16(two[0], pair.low);
                two[1] = BEGINS ? vpaddlq_s16(pair.high) : vpadalq_s16(two[1], pair.high);
                if (ROWS > 2) now(two[0]), now(two[1]);
            }
        }
    });
#pragma GCC unroll 2
    for (int part = 0; part < PARTS<C>; ++part)
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int quarter = 0; quarter < COUNT; ++quarter)
                sums[part][row][quarter] = vpaddq_s32(wide[part][row][quarter][0], wide[part][row][quarter][1]);
}

// sums[part][row][quarter] of the quarters from `from` on, over the whole group or each of its halves.
template <class C, int ROWS, int COUNT>
static inline void dots(const uint8_t* group, int from, const InputBlock* blocks, int32x4_t sums[PARTS<C>][ROWS][COUNT]) {
    if constexpr (C::BITS == 8)
        dots_of_eight_bits<C, ROWS, COUNT>(group, from, blocks, sums);
    else
        dots_of_few_bits<C, ROWS, COUNT>(group, from, blocks, sums);
}

}  // namespace TM_NS
