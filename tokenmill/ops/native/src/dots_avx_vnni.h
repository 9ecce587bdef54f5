// Sums of products of codes with inputs, for AVX-VNNI: one instruction adds four of them in 32 bits, whatever their codes.
//
// Included by matrix_avx2.h, which has unpack() and broadcast().
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace TM_NS {

// sum += the sums of four products each. Written out, so that a compiler need not know it, only its assembler, and the
// order is as it stands here: by another one more would be kept in registers than there are. CPUs with AVX-512 have the
// same instruction in another encoding: with that, which only tests ask for, they can run this code as well.
static inline void add_fours(__m256i& sum, __m256i codes, __m256i inputs) {
#if defined(TM_STAND_IN)
    __asm__("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(inputs));
#else
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(inputs));
#endif
}

// Sums begin with their zero points.
template <class C>
constexpr bool SUBTRACT_ZERO = false;

template <class C>
static inline __m256i zero_term(int32_t minus) {
    if constexpr (C::HAS_ZERO) return _mm256_slli_epi32(_mm256_set1_epi32(minus), C::ZERO_SHIFT);
    return _mm256_setzero_si256();
}

// Whether both halves of a panel are multiplied with an input that was broadcast once: where their sums fit in the registers.
template <class C>
constexpr bool BOTH_HALVES = C::SCALES != K_SIXTEENTHS;

// sums[half][row]: of four products each, over the whole group.
template <class C, int ROWS>
static inline void dots_of_both(const uint8_t* at, const InputBlock* blocks, __m256i sums[2][ROWS]) {
    for (int row = 0; row < ROWS; ++row) sums[0][row] = sums[1][row] = zero_term<C>(blocks[row].minus_sum);
    if constexpr (C::BITS == 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256i codes[2] = {load(at + 64 * j), load(at + 64 * j + 32)};
            for (int row = 0; row < ROWS; ++row) {
                const __m256i x = broadcast(blocks[row].q + 4 * j);
                for (int half = 0; half < 2; ++half) add_fours(sums[half][row], codes[half], x);
            }
        }
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            __m256i low[2], high[2];
            for (int half = 0; half < 2; ++half) unpack<C::BITS>(at, half, j, low[half], high[half]);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row) {
                const __m256i first = broadcast(blocks[row].q + 4 * j), second = broadcast(blocks[row].q + 16 + 4 * j);
                for (int half = 0; half < 2; ++half) add_fours(sums[half][row], low[half], first);
                for (int half = 0; half < 2; ++half) add_fours(sums[half][row], high[half], second);
            }
        }
    }
}

// For scales of 16 columns: of a group's first half, and in `others` of its second; in one half of the panel.
template <class C, int ROWS>
static inline void dots(const uint8_t* at, int half, const InputBlock* blocks, __m256i sums[ROWS], __m256i others[ROWS]) {
    for (int row = 0; row < ROWS; ++row) {
        sums[row] = zero_term<C>(blocks[row].minus_half);
        others[row] = zero_term<C>(blocks[row].minus_sum - blocks[row].minus_half);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m256i low, high;
        if constexpr (C::BITS == 8) {
            low = load(at + 64 * j + 32 * half);
            high = load(at + 64 * (j + 4) + 32 * half);
        } else {
            unpack<C::BITS>(at, half, j, low, high);
        }
        for (int row = 0; row < ROWS; ++row) {
            add_fours(sums[row], low, broadcast(blocks[row].q + 4 * j));
            add_fours(others[row], high, broadcast(blocks[row].q + 16 + 4 * j));
        }
    }
}

}  // namespace TM_NS
