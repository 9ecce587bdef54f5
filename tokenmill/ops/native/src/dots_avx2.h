// Sums of products of codes with inputs, for AVX2: pairs are added in 16 bits as long as they fit, then in 32.
//
// Included by matrix_avx2.h, which has unpack() and broadcast().
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace TM_NS {

// The compiler would add in another order, keep all products until the end, and run out of registers.
static inline void now(__m256i& sum) { __asm__("" : "+x"(sum)); }

// Whether zero points are subtracted from the sums; 8-bit codes are made signed instead.
template <class C>
constexpr bool SUBTRACT_ZERO = C::HAS_ZERO && C::BITS < 8;

// Whether both halves of a panel are multiplied with an input that was broadcast once: where their sums fit in the registers.
template <class C>
constexpr bool BOTH_HALVES = C::BITS < 8 && C::SCALES != K_SIXTEENTHS;

// Products of pairs that 16 bits hold the sum of: 8, 4, 2.
template <class C>
constexpr int TOGETHER = C::BITS < 8 ? 1 << (7 - C::BITS) : 1;

// sums[half][row]: of four products each, over the whole group.
template <class C, int ROWS>
static inline void dots_of_both(const uint8_t* at, const InputBlock* blocks, __m256i sums[2][ROWS]) {
    constexpr int STEPS = TOGETHER<C> / 2;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs[2][ROWS];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m256i low[2], high[2];
        for (int half = 0; half < 2; ++half) unpack<C::BITS>(at, half, j, low[half], high[half]);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row) {
            const __m256i first = broadcast(blocks[row].q + 4 * j);
            for (int half = 0; half < 2; ++half) {
                const __m256i a = _mm256_maddubs_epi16(low[half], first);
                pairs[half][row] = j % STEPS ? _mm256_add_epi16(pairs[half][row], a) : a;
                now(pairs[half][row]);
            }
            const __m256i second = broadcast(blocks[row].q + 16 + 4 * j);
            for (int half = 0; half < 2; ++half) {
                __m256i& pair = pairs[half][row];
                pair = _mm256_add_epi16(pair, _mm256_maddubs_epi16(high[half], second));
                now(pair);
                if (j % STEPS < STEPS - 1) continue;
                const __m256i fours = _mm256_madd_epi16(pair, ones);
                sums[half][row] = j < STEPS ? fours : _mm256_add_epi32(sums[half][row], fours);
            }
        }
    }
}

// Sums of four products each for ROWS rows of inputs in one half: of the whole group, or for scales of 16 columns, of its
// first half and in `others` of its second.
template <class C, int ROWS>
static inline void dots(const uint8_t* at, int half, const InputBlock* blocks, __m256i sums[ROWS], __m256i others[ROWS]) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int row = 0; row < ROWS; ++row) sums[row] = others[row] = _mm256_setzero_si256();
    if constexpr (C::BITS == 8) {
        // Unsigned times signed would overflow 16 bits: multiply magnitudes with inputs that carry the weights' signs.
        const __m256i flip = _mm256_set1_epi8(-128);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256i weight = _mm256_xor_si256(load(at + 64 * j + 32 * half), flip), size = _mm256_abs_epi8(weight);
            for (int row = 0; row < ROWS; ++row) {
                const __m256i x = _mm256_sign_epi8(broadcast(blocks[row].q + 4 * j), weight);
                __m256i& sum = C::SCALES == K_SIXTEENTHS && j >= 4 ? others[row] : sums[row];
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(size, x), ones));
                now(sum);
            }
        }
    } else {
        __m256i pairs[ROWS], tails[ROWS];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            __m256i low, high;
            unpack<C::BITS>(at, half, j, low, high);
            for (int row = 0; row < ROWS; ++row) {
                const __m256i a = _mm256_maddubs_epi16(low, broadcast(blocks[row].q + 4 * j));
                const __m256i b = _mm256_maddubs_epi16(high, broadcast(blocks[row].q + 16 + 4 * j));
                pairs[row] = j % TOGETHER<C> ? _mm256_add_epi16(pairs[row], a) : a;
                tails[row] = j % TOGETHER<C> ? _mm256_add_epi16(tails[row], b) : b;
                now(pairs[row]);
                now(tails[row]);
                if (j % TOGETHER<C> == TOGETHER<C> - 1) {
                    sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(pairs[row], ones));
                    others[row] = _mm256_add_epi32(others[row], _mm256_madd_epi16(tails[row], ones));
                }
            }
        }
    }
}

}  // namespace TM_NS
