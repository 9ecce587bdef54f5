// Sums of products of codes with inputs, for ARM with dot products: one instruction adds four of them in 32 bits, and takes
// its four inputs from a lane.
//
// Included by matrix_neon.h, which has unpack() and zero_term().
#pragma once

#include <arm_neon.h>

#include "formats.h"

namespace TM_NS {

// Half of the registers are sums.
template <class C>
constexpr int quarters_at_once(int rows) {
    const int most = 16 / (rows * PARTS<C>);
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// sums[part][row][quarter] of the quarters from `from` on, over the whole group or each of its halves.
template <class C, int ROWS, int COUNT>
static inline void dots(const uint8_t* group, int from, const InputBlock* blocks, int32x4_t sums[PARTS<C>][ROWS][COUNT]) {
    int8x16_t x[ROWS][2];
    for (int row = 0; row < ROWS; ++row) {
        for (int half = 0; half < 2; ++half) x[row][half] = vld1q_s8(blocks[row].q + 16 * half);
        for (int part = 0; part < PARTS<C>; ++part)
            for (int quarter = 0; quarter < COUNT; ++quarter)
                sums[part][row][quarter] = zero_term<C>(minus_of<C>(blocks[row], part));
    }
    four_times([&](auto j) __attribute__((always_inline)) {
        constexpr int J = decltype(j)::VALUE;
#pragma GCC unroll 4
        for (int quarter = 0; quarter < COUNT; ++quarter) {
            int8x16_t low, high;
            unpack<C::BITS, J>(group, from + quarter, low, high);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row) {
                int32x4_t &first = sums[0][row][quarter], &second = sums[PARTS<C> - 1][row][quarter];
                first = vdotq_laneq_s32(first, low, x[row][0], J);
                second = vdotq_laneq_s32(second, high, x[row][1], J);
                if (ROWS > 2) now(first), now(second);
            }
        }
    });
}

}  // namespace TM_NS
