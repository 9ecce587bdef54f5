// Products of packed panels with a tile of quantized inputs, for AVX2 with or without VNNI, which takes a panel's rows in two
// halves of 8.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace TM_NS {

using namespace mill;

constexpr int MAX_ROWS = 4;  // of a tile that are multiplied at once, so that all sums stay in registers

static inline __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

static inline __m256i broadcast(const int8_t* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    return _mm256_set1_epi32(word);
}

// Bit 4 r + i of the word becomes 16 in byte 4 r + i.
static inline __m256i fifth_bits(const uint8_t* word) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i here = _mm256_shuffle_epi8(broadcast(reinterpret_cast<const int8_t*>(word)), spread);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(here, bit), bit), _mm256_set1_epi8(16));
}

// The code vectors j and j + 4 (with 8 bits: j alone) of half a panel; `at` is the group's first byte.
template <int BITS>
static inline void unpack(const uint8_t* at, int half, int j, __m256i& low, __m256i& high) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i both = load(at + 64 * j + 32 * half);
    low = _mm256_and_si256(both, nibble);
    high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    if constexpr (BITS == 5) {
        low = _mm256_or_si256(low, fifth_bits(at + 256 + 8 * j + 4 * half));
        high = _mm256_or_si256(high, fifth_bits(at + 256 + 8 * (j + 4) + 4 * half));
    }
    if constexpr (BITS == 6) {
        const __m256i two = _mm256_set1_epi8(48);
        const __m256i first = load(at + 256 + 32 * half), second = load(at + 320 + 32 * half);
        const auto move = [j](__m256i four) {
            return j < 2 ? _mm256_slli_epi16(four, 4 - 2 * j) : j == 2 ? four : _mm256_srli_epi16(four, 2);
        };
        low = _mm256_or_si256(low, _mm256_and_si256(move(first), two));
        high = _mm256_or_si256(high, _mm256_and_si256(move(second), two));
    }
}

}  // namespace TM_NS

#if TM_LEVEL >= TM_AVX_VNNI
#include "dots_avx_vnni.h"
#else
#include "dots_avx2.h"
#endif

namespace TM_NS {

static inline __m256 halves(const uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

static inline __m256 small(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

static inline __m256 small_signed(const uint8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

// The scales of a chunk for 8 rows from `lane` on, and what they are for each of its groups.
template <class C>
struct ChunkScales {
    const uint8_t* at;
    int lane;
    __m256 d, dmin;

    inline ChunkScales(const uint8_t* scales, int lane)
        : at(scales), lane(lane), d(first(scales, lane)), dmin(_mm256_setzero_ps()) {
        if constexpr (C::SCALES == K_MINIMUM) dmin = _mm256_sub_ps(dmin, halves(scales + 2 * PANEL + 2 * lane));
    }
    static inline __m256 first(const uint8_t* scales, int lane) {
        if constexpr (C::FLOAT_D) return _mm256_loadu_ps(reinterpret_cast<const float*>(scales) + lane);
        return halves(scales + 2 * lane);
    }
    inline __m256 scale(int g) const {  // of a group; with K_SIXTEENTHS of its first half
        if constexpr (C::SCALES == SYMMETRIC) return halves(at + 2 * PANEL * g + 2 * lane);
        if constexpr (C::SCALES == MINIMUM) return d;
        if constexpr (C::SCALES == K_MINIMUM) return _mm256_mul_ps(d, small(at + SMALL_AT + g * PANEL + lane));
        return _mm256_mul_ps(d, small_signed(at + SMALL_AT + 2 * g * PANEL + lane));
    }
    inline __m256 other(int g) const {  // the minimum, or the scale of the second half
        if constexpr (C::SCALES == SYMMETRIC) return d;
        if constexpr (C::SCALES == MINIMUM) return halves(at + 2 * PANEL + 2 * lane);
        if constexpr (C::SCALES == K_MINIMUM) return _mm256_mul_ps(dmin, small(at + SMALL_MINIMUMS_AT + g * PANEL + lane));
        return _mm256_mul_ps(d, small_signed(at + SMALL_AT + (2 * g + 1) * PANEL + lane));
    }
};

// What the sums are without their zero points: `minus` is minus the sum of the inputs.
template <class C>
static inline __m256i without_zero(__m256i sums, int32_t minus) {
    if constexpr (SUBTRACT_ZERO<C>)
        return _mm256_add_epi32(sums, _mm256_slli_epi32(_mm256_set1_epi32(minus), C::ZERO_SHIFT));
    return sums;
}

// Adds the sums of one group to the totals of ROWS rows of one half.
template <class C, int ROWS>
static inline void add_sums(const __m256i sums[ROWS], const __m256i others[ROWS], __m256 scale, __m256 other,
                            const InputBlock* blocks, __m256 totals[ROWS]) {
    for (int row = 0; row < ROWS; ++row) {
        const InputBlock& x = blocks[row];
        const __m256 d = _mm256_broadcast_ss(&x.d);
        if constexpr (C::SCALES == K_SIXTEENTHS) {
            const __m256 first = _mm256_cvtepi32_ps(without_zero<C>(sums[row], x.minus_half));
            const __m256 second = _mm256_cvtepi32_ps(without_zero<C>(others[row], x.minus_sum - x.minus_half));
            const __m256 both = _mm256_fmadd_ps(first, scale, _mm256_mul_ps(second, other));
            totals[row] = _mm256_fmadd_ps(both, d, totals[row]);
        } else {
            const __m256i whole = without_zero<C>(sums[row], x.minus_sum);
            totals[row] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale), d, totals[row]);
            if constexpr (!C::HAS_ZERO)
                totals[row] = _mm256_fmadd_ps(other, _mm256_broadcast_ss(&x.sum), totals[row]);
        }
    }
}

// Adds one group to the totals of ROWS rows, [half][row].
template <class C, int ROWS>
static inline void add_group(const uint8_t* codes, const ChunkScales<C> scales[2], int g, const InputBlock* blocks,
                             __m256 totals[2][ROWS]) {
    if constexpr (BOTH_HALVES<C>) {
        __m256i sums[2][ROWS];
        dots_of_both<C, ROWS>(codes, blocks, sums);
        for (int half = 0; half < 2; ++half)
            add_sums<C, ROWS>(sums[half], sums[half], scales[half].scale(g), scales[half].other(g), blocks, totals[half]);
    } else {
        for (int half = 0; half < 2; ++half) {
            // Inputs that are kept from the first half to the second would not fit in the registers: the compiler must not
            // know that they are the same.
            __asm__("" : "+r"(blocks));
            __m256i sums[ROWS], others[ROWS];
            dots<C, ROWS>(codes, half, blocks, sums, others);
            add_sums<C, ROWS>(sums, others, scales[half].scale(g), scales[half].other(g), blocks, totals[half]);
        }
    }
}

// The weights of an outlier's column in a half of the rows, without their minimums.
template <class C>
static inline __m256 weights_of(const uint8_t* panel, const Outlier& one, int half) {
    const uint32_t column = one.column, j = column / 4, in = one.group % C::CHUNK;
    const uint8_t* const chunk = panel + C::scales_at(one.group);
    const uint8_t* const at = chunk + C::SCALE_BYTES + in * C::GROUP_BYTES + 32 * half;
    const auto bits = [](const uint8_t* words, uint32_t from, int mask) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
        const __m256i count = _mm256_set1_epi32(static_cast<int>(from));
        return _mm256_and_si256(_mm256_srlv_epi32(raw, count), _mm256_set1_epi32(mask));
    };
    __m256i codes;
    if constexpr (C::BITS == 8) {
        codes = bits(at + 64 * j, one.shift & 24, 255);
    } else {
        codes = bits(at + one.vector, one.shift, 15);
        if constexpr (C::BITS == 5) {
            int32_t word;
            __builtin_memcpy(&word, at - 32 * half + 256 + 8 * j + 4 * half, 4);
            const __m256i first = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            const __m256i from = _mm256_add_epi32(first, _mm256_set1_epi32(static_cast<int>(column % 4)));
            const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), from), _mm256_set1_epi32(1));
            codes = _mm256_or_si256(codes, _mm256_slli_epi32(high, 4));
        }
        if constexpr (C::BITS == 6) {
            const __m256i high = bits(at + 256 + 64 * (j / 4), (one.shift & 24) + 2 * (j % 4), 3);
            codes = _mm256_or_si256(codes, _mm256_slli_epi32(high, 4));
        }
    }
    if constexpr (C::HAS_ZERO) codes = _mm256_sub_epi32(codes, _mm256_set1_epi32(1 << C::ZERO_SHIFT));
    const ChunkScales<C> scales(chunk, 8 * half);
    const bool second = C::SCALES == K_SIXTEENTHS && j >= 4;
    const __m256 scale = second ? scales.other(static_cast<int>(in)) : scales.scale(static_cast<int>(in));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale);
}

// totals[half][row] = a panel times ROWS rows.
template <class C, int ROWS>
static inline void multiply(const uint8_t* panel, int64_t columns, const Rows& rows, __m256 totals[2][ROWS]) {
    for (int row = 0; row < ROWS; ++row) totals[0][row] = totals[1][row] = _mm256_setzero_ps();
    const uint8_t* at = panel;
    const InputBlock* blocks = rows.blocks;
    for (int64_t left = columns / GROUP; left > 0; left -= C::CHUNK) {
        if constexpr (ROWS <= 2) prefetch<C>(at);
        const int groups = left < C::CHUNK ? static_cast<int>(left) : C::CHUNK;
        const ChunkScales<C> scales[2] = {{at, 0}, {at, 8}};
        for (int g = 0; g < groups; ++g)
            add_group<C, ROWS>(at + C::SCALE_BYTES + g * C::GROUP_BYTES, scales, g, blocks + g * rows.stride, totals);
        at += C::CHUNK_BYTES;
        blocks += groups * rows.stride;
    }
    for (const Outlier* one = rows.outliers; one < rows.outliers + rows.taken[0]; ++one)
        for (int half = 0; half < 2; ++half) {
            const __m256 weights = weights_of<C>(panel, *one, half);
            for (int row = 0; row < ROWS; ++row) {
                const __m256 x = _mm256_broadcast_ss(&one->x[rows.first + row]);
                totals[half][row] = _mm256_fmadd_ps(weights, x, totals[half][row]);
            }
        }
}

struct DenseF32 {
    static constexpr int BYTES = 4;
    static inline __m256 load8(const uint8_t* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
};
struct DenseF16 {
    static constexpr int BYTES = 2;
    static inline __m256 load8(const uint8_t* at) { return halves(at); }
};
struct DenseBF16 {
    static constexpr int BYTES = 2;
    static inline __m256 load8(const uint8_t* at) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
};

// `width` of the 8 columns of this half.
static inline void put(__m256 total, float* out, int width, const float* bias) {
    if (width >= 8) {
        _mm256_storeu_ps(out, bias ? _mm256_add_ps(total, _mm256_loadu_ps(bias)) : total);
        return;
    }
    float parts[8];
    _mm256_storeu_ps(parts, total);
    for (int lane = 0; lane < width; ++lane) out[lane] = bias ? parts[lane] + bias[lane] : parts[lane];
}

template <class C, int ROWS>
static void product(const uint8_t* panel, int64_t columns, const Rows& rows, float* out, int64_t out_stride, int width,
                    const float* bias) {
    __m256 totals[2][ROWS];
    multiply<C, ROWS>(panel, columns, rows, totals);
    for (int half = 0; 8 * half < width; ++half)
        for (int row = 0; row < ROWS; ++row)
            put(totals[half][row], out + row * out_stride + 8 * half, width - 8 * half, bias ? bias + 8 * half : nullptr);
}

constexpr int DENSE_ROWS = 6;  // of a tile, that dense panels are multiplied with at once: 12 of the 16 registers are sums

// Panels that so many rows take at once: a sum waits for its last addition, and meanwhile others are added to.
constexpr int dense_panels(int rows) { return rows <= 4 ? 4 / rows : 1; }

// PANELS dense panels, which are `apart` bytes from each other, times ROWS rows: x is [columns][stride] floats, one column
// of the tile after the other. Every output is one sum over the columns in their order.
template <class D, int ROWS, int PANELS>
static void product_dense(const uint8_t* panels, int64_t apart, int64_t columns, const float* x, int64_t stride, float* out,
                          int64_t out_stride, int64_t width, const float* bias) {
    __m256 sums[2 * PANELS][ROWS];  // of half panels
    for (int half = 0; half < 2 * PANELS; ++half)
        for (int row = 0; row < ROWS; ++row) sums[half][row] = _mm256_setzero_ps();
    for (int64_t k = 0; k < columns; ++k) {
        __m256 weights[2 * PANELS];
        for (int half = 0; half < 2 * PANELS; ++half)
            weights[half] = D::load8(panels + half / 2 * apart + half % 2 * 8 * D::BYTES);
        panels += D::BYTES * PANEL;
        for (int row = 0; row < ROWS; ++row) {
            const __m256 value = _mm256_broadcast_ss(x + row);
            for (int half = 0; half < 2 * PANELS; ++half)
                sums[half][row] = _mm256_fmadd_ps(weights[half], value, sums[half][row]);
        }
        x += stride;
    }
    // A loop that is not unrolled would keep all sums in memory.
#pragma GCC unroll 8
    for (int half = 0; half < 2 * PANELS; ++half) {
        const int64_t left = width - 8 * half;
#pragma GCC unroll 6
        for (int row = 0; row < ROWS && left > 0; ++row)
            put(sums[half][row], out + row * out_stride + 8 * half, left < 8 ? static_cast<int>(left) : 8,
                bias ? bias + 8 * half : nullptr);
    }
}

// The 32 inputs of a block.
struct Values {
    __m256 part[4];

    explicit inline Values(const float* x) {
        for (int i = 0; i < 4; ++i) part[i] = _mm256_loadu_ps(x + 8 * i);
    }
    static inline __m256 size_of(__m256 values) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values); }

    // The largest magnitude; not finite if one of them is not.
    inline float largest() const {
        __m256 top = _mm256_setzero_ps();
        int unordered = 0;
        for (int i = 0; i < 4; ++i) {
            top = _mm256_max_ps(top, size_of(part[i]));
            unordered |= _mm256_movemask_ps(_mm256_cmp_ps(part[i], part[i], _CMP_UNORD_Q));
        }
        if (unordered) return __builtin_nanf("");
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }

    // Makes the first value of this magnitude zero; returns where it is.
    inline int drop(float size) {
        uint32_t found = 0;
        for (int i = 0; i < 4; ++i) {
            const int equal = _mm256_movemask_ps(_mm256_cmp_ps(size_of(part[i]), _mm256_set1_ps(size), _CMP_EQ_OQ));
            found |= static_cast<uint32_t>(equal) << 8 * i;
        }
        const int place = __builtin_ctz(found);
        for (int i = 0; i < 4; ++i) {
            const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            const __m256i here = _mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(place - 8 * i));
            part[i] = _mm256_andnot_ps(_mm256_castsi256_ps(here), part[i]);
        }
        return place;
    }

    // Rounds a half; returns the sum of its codes.
    inline int round(int half, float inverse, int8_t* q) const {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(part[2 * half], _mm256_set1_ps(inverse)));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(part[2 * half + 1], _mm256_set1_ps(inverse)));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q), bytes);
        const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
    }
};

}  // namespace TM_NS
