// Products of packed panels with a tile of quantized inputs, for AVX-512 with or without VNNI.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace TM_NS {

using namespace mill;

constexpr int MAX_ROWS = 16;  // of a tile that are multiplied at once; each takes one register of sums

static inline __m512i load(const uint8_t* at) { return _mm512_loadu_si512(at); }

// The 8 code vectors of one group.
template <int BITS>
static inline void unpack(const uint8_t* at, __m512i out[8]) {
    if constexpr (BITS == 8) {
        for (int j = 0; j < 8; ++j) out[j] = load(at + 64 * j);
    } else {
        const __m512i nibble = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; ++j) {
            const __m512i both = load(at + 64 * j);
            out[j] = _mm512_and_si512(both, nibble);
            out[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        }
        if constexpr (BITS == 5) {
            const __m512i high = _mm512_set1_epi8(16);
            const uint64_t* masks = reinterpret_cast<const uint64_t*>(at + 256);
            for (int j = 0; j < 8; ++j) out[j] = _mm512_mask_add_epi8(out[j], masks[j], out[j], high);
        }
        if constexpr (BITS == 6) {
            const __m512i high = _mm512_set1_epi8(48);
            for (int h = 0; h < 2; ++h) {
                const __m512i four = load(at + 256 + 64 * h);
                const __m512i parts[4] = {_mm512_slli_epi16(four, 4), _mm512_slli_epi16(four, 2), four,
                                          _mm512_srli_epi16(four, 2)};
                for (int f = 0; f < 4; ++f)
                    out[4 * h + f] = _mm512_or_si512(out[4 * h + f], _mm512_and_si512(parts[f], high));
            }
        }
    }
}

static inline __m512i broadcast(const int8_t* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    return _mm512_set1_epi32(word);
}

// sums[row] += the sums of four products each, over COUNT code vectors from `first` on. Rows take turns: each waits for
// its own last sum, and meanwhile the others are multiplied.
template <int BITS, int COUNT, int ROWS>
static inline void dots(const __m512i* codes, const InputBlock* blocks, int first, __m512i sums[ROWS]) {
#if TM_LEVEL >= TM_VNNI
#pragma GCC unroll 8
    for (int j = first; j < first + COUNT; ++j)
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
            sums[row] = _mm512_dpbusd_epi32(sums[row], codes[j], broadcast(blocks[row].q + 4 * j));
#else
    const __m512i ones = _mm512_set1_epi16(1);
    for (int row = 0; row < ROWS; ++row) {
        const int8_t* q = blocks[row].q;
        if constexpr (BITS == 8) {
            // Unsigned times signed would overflow 16 bits: multiply magnitudes with inputs that carry the weights' signs.
            const __m512i flip = _mm512_set1_epi8(-128), zero = _mm512_setzero_si512();
            for (int j = first; j < first + COUNT; ++j) {
                const __m512i weight = _mm512_xor_si512(codes[j], flip), x = broadcast(q + 4 * j);
                const __m512i moved = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(weight), zero, x);
                const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(weight), moved);
                sums[row] = _mm512_add_epi32(sums[row], _mm512_madd_epi16(pairs, ones));
            }
        } else {
            constexpr int TOGETHER = 1 << (7 - BITS);  // as many products of pairs as 16 bits hold: 8, 4, 2
            for (int from = first; from < first + COUNT; from += TOGETHER) {
                __m512i pairs = _mm512_maddubs_epi16(codes[from], broadcast(q + 4 * from));
                for (int j = from + 1; j < from + TOGETHER && j < first + COUNT; ++j)
                    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes[j], broadcast(q + 4 * j)));
                sums[row] = _mm512_add_epi32(sums[row], _mm512_madd_epi16(pairs, ones));
            }
        }
    }
#endif
}

static inline __m512 halves(const uint8_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

static inline __m512 small(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

static inline __m512 small_signed(const uint8_t* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

// Whether zero points are subtracted as integers; without VNNI, 8-bit codes are made signed instead.
template <class C>
constexpr bool SUBTRACT_ZERO = C::HAS_ZERO && (TM_LEVEL >= TM_VNNI || C::BITS < 8);

// The scales of a chunk, and what they are for each of its groups.
template <class C>
struct ChunkScales {
    const uint8_t* at;
    __m512 d, dmin;

    explicit inline ChunkScales(const uint8_t* scales) : at(scales), d(first(scales)), dmin(_mm512_setzero_ps()) {
        if constexpr (C::SCALES == K_MINIMUM) dmin = _mm512_sub_ps(dmin, halves(scales + 2 * PANEL));
    }
    static inline __m512 first(const uint8_t* scales) {
        if constexpr (C::FLOAT_D) return _mm512_loadu_ps(scales);
        return halves(scales);
    }
    inline __m512 scale(int g) const {  // of a group; with K_SIXTEENTHS of its first half
        if constexpr (C::SCALES == SYMMETRIC) return halves(at + 2 * PANEL * g);
        if constexpr (C::SCALES == MINIMUM) return d;
        if constexpr (C::SCALES == K_MINIMUM) return _mm512_mul_ps(d, small(at + SMALL_AT + g * PANEL));
        return _mm512_mul_ps(d, small_signed(at + SMALL_AT + 2 * g * PANEL));
    }
    inline __m512 other(int g) const {  // the minimum, or the scale of the second half
        if constexpr (C::SCALES == SYMMETRIC) return d;
        if constexpr (C::SCALES == MINIMUM) return halves(at + 2 * PANEL);
        if constexpr (C::SCALES == K_MINIMUM) return _mm512_mul_ps(dmin, small(at + SMALL_MINIMUMS_AT + g * PANEL));
        return _mm512_mul_ps(d, small_signed(at + SMALL_AT + (2 * g + 1) * PANEL));
    }
};

// What zero points add to the sums: `minus` is minus the sum of the inputs.
template <class C>
static inline __m512i zero_term(int32_t minus) {
    if constexpr (SUBTRACT_ZERO<C>) return _mm512_slli_epi32(_mm512_set1_epi32(minus), C::ZERO_SHIFT);
    return _mm512_setzero_si512();
}

// Adds one group to the sums of ROWS rows.
template <class C, int ROWS>
[[gnu::always_inline]] static inline void add_group(const __m512i* codes, __m512 scale, __m512 other,
                                                    const InputBlock* blocks, __m512 sums[ROWS]) {
    __m512i dot[ROWS];
    if constexpr (C::SCALES == K_SIXTEENTHS) {
        __m512i rest[ROWS];
        for (int row = 0; row < ROWS; ++row) {
            dot[row] = zero_term<C>(blocks[row].minus_half);
            rest[row] = zero_term<C>(blocks[row].minus_sum - blocks[row].minus_half);
        }
        dots<C::BITS, 4, ROWS>(codes, blocks, 0, dot);
        dots<C::BITS, 4, ROWS>(codes, blocks, 4, rest);
        for (int row = 0; row < ROWS; ++row) {
            const __m512 first = _mm512_cvtepi32_ps(dot[row]), second = _mm512_cvtepi32_ps(rest[row]);
            const __m512 both = _mm512_fmadd_ps(first, scale, _mm512_mul_ps(second, other));
            sums[row] = _mm512_fmadd_ps(both, _mm512_set1_ps(blocks[row].d), sums[row]);
        }
    } else {
        for (int row = 0; row < ROWS; ++row) dot[row] = zero_term<C>(blocks[row].minus_sum);
        dots<C::BITS, 8, ROWS>(codes, blocks, 0, dot);
        for (int row = 0; row < ROWS; ++row) {
            const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[row]), scale);
            sums[row] = _mm512_fmadd_ps(sum, _mm512_set1_ps(blocks[row].d), sums[row]);
            if constexpr (!C::HAS_ZERO)
                sums[row] = _mm512_fmadd_ps(other, _mm512_set1_ps(blocks[row].sum), sums[row]);
        }
    }
}

// The weights of an outlier's column, without their minimums.
template <class C>
static inline __m512 weights_of(const uint8_t* panel, const Outlier& one) {
    const uint32_t j = one.column / 4, in = one.group % C::CHUNK;
    const uint8_t* const chunk = panel + C::scales_at(one.group);
    const uint8_t* const at = chunk + C::SCALE_BYTES + in * C::GROUP_BYTES;
    const auto bits = [](__m512i words, uint32_t from, int mask) {
        return _mm512_and_si512(_mm512_srlv_epi32(words, _mm512_set1_epi32(static_cast<int>(from))), _mm512_set1_epi32(mask));
    };
    __m512i codes;
    if constexpr (C::BITS == 8) {
        codes = bits(load(at + 64 * j), one.shift & 24, 255);
    } else {
        codes = bits(load(at + one.vector), one.shift, 15);
        if constexpr (C::BITS == 5) {
            const uint64_t* masks = reinterpret_cast<const uint64_t*>(at + 256);
            codes = _mm512_or_si512(codes, bits(_mm512_maskz_set1_epi8(masks[j], 16), one.shift & 24, 16));
        }
        if constexpr (C::BITS == 6) {
            const __m512i high = bits(load(at + 256 + 64 * (j / 4)), (one.shift & 24) + 2 * (j % 4), 3);
            codes = _mm512_or_si512(codes, _mm512_slli_epi32(high, 4));
        }
    }
    // As a float: the code in the last bits of 2^23, minus that and the zero point, which is exact.
    constexpr int ZERO = C::HAS_ZERO ? 1 << C::ZERO_SHIFT : 0;
    const __m512 raised = _mm512_castsi512_ps(_mm512_or_si512(codes, _mm512_set1_epi32(0x4b000000)));
    const __m512 values = _mm512_sub_ps(raised, _mm512_set1_ps(8388608.0f + ZERO));
    const ChunkScales<C> scales(chunk);
    const bool second = C::SCALES == K_SIXTEENTHS && j >= 4;
    return _mm512_mul_ps(values, second ? scales.other(static_cast<int>(in)) : scales.scale(static_cast<int>(in)));
}

template <class C, int COUNT>
[[gnu::always_inline]] static inline void add_outlier(const uint8_t* panel, const Outlier& one, int first, __m512* sums) {
    const __m512 weights = weights_of<C>(panel, one);
#pragma GCC unroll 4
    for (int row = 0; row < COUNT; ++row)
        sums[row] = _mm512_fmadd_ps(weights, _mm512_set1_ps(one.x[first + row]), sums[row]);
}

// Adds the outliers of one quad that come after the first `done`.
template <class C, int COUNT>
[[gnu::always_inline]] static inline void add_outliers_of_quad(const uint8_t* panel, const Rows& rows, int quad, int64_t done,
                                                               __m512* sums) {
    const Outlier* const list = rows.outliers + quad * rows.room;
    for (int64_t i = done; i < rows.taken[quad]; ++i) add_outlier<C, COUNT>(panel, list[i], rows.first, sums);
}

// Adds the outliers of ROWS rows. Whole quads take turns as long as all have some: a sum waits for its last addition.
template <class C, int ROWS>
static inline void add_outliers(const uint8_t* panel, const Rows& rows, __m512 sums[ROWS]) {
    constexpr int WHOLE = ROWS / QUAD, LEFT = ROWS % QUAD;
    int64_t all = 0;
    if constexpr (WHOLE > 1) {
        all = rows.taken[0];
        for (int quad = 1; quad < WHOLE; ++quad) all = rows.taken[quad] < all ? rows.taken[quad] : all;
        for (int64_t i = 0; i < all; ++i)
#pragma GCC unroll 4
            for (int quad = 0; quad < WHOLE; ++quad)
                add_outlier<C, QUAD>(panel, rows.outliers[quad * rows.room + i], rows.first, sums + quad * QUAD);
    }
#pragma GCC unroll 4
    for (int quad = 0; quad < WHOLE; ++quad) add_outliers_of_quad<C, QUAD>(panel, rows, quad, all, sums + quad * QUAD);
    if constexpr (LEFT > 0) add_outliers_of_quad<C, LEFT>(panel, rows, WHOLE, 0, sums + WHOLE * QUAD);
}

// sums[row] = a panel times ROWS rows.
template <class C, int ROWS>
static inline void multiply(const uint8_t* panel, int64_t columns, const Rows& rows, __m512 sums[ROWS]) {
    constexpr int TURNS = ROWS <= 8 ? ROWS : 8;  // more would not fit into registers
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) sums[row] = _mm512_setzero_ps();
    const uint8_t* at = panel;
    const InputBlock* blocks = rows.blocks;
    for (int64_t left = columns / GROUP; left > 0; left -= C::CHUNK) {
        prefetch<C>(at);
        const ChunkScales<C> scales(at);
        at += C::SCALE_BYTES;
        const int groups = left < C::CHUNK ? static_cast<int>(left) : C::CHUNK;
        for (int g = 0; g < groups; ++g) {
            __m512i codes[8];
            unpack<C::BITS>(at, codes);
            const __m512 scale = scales.scale(g), other = scales.other(g);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row += TURNS)
                add_group<C, TURNS>(codes, scale, other, blocks + row, sums + row);
            at += C::GROUP_BYTES;
            blocks += rows.stride;
        }
    }
    add_outliers<C, ROWS>(panel, rows, sums);
}

struct DenseF32 {
    static constexpr int BYTES = 4;
    static inline __m512 load16(const uint8_t* at) { return _mm512_loadu_ps(at); }
};
struct DenseF16 {
    static constexpr int BYTES = 2;
    static inline __m512 load16(const uint8_t* at) { return halves(at); }
};
struct DenseBF16 {
    static constexpr int BYTES = 2;
    static inline __m512 load16(const uint8_t* at) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
};

// Writes the sums to rows of the output, `width` of 16 columns.
template <int ROWS>
static inline void put(const __m512 sums[ROWS], float* out, int64_t out_stride, int width, const float* bias) {
    const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1);
    const __m512 add = bias ? _mm512_maskz_loadu_ps(mask, bias) : _mm512_setzero_ps();
    for (int row = 0; row < ROWS; ++row)
        _mm512_mask_storeu_ps(out + row * out_stride, mask, bias ? _mm512_add_ps(sums[row], add) : sums[row]);
}

template <class C, int ROWS>
static void product(const uint8_t* panel, int64_t columns, const Rows& rows, float* out, int64_t out_stride, int width,
                    const float* bias) {
    __m512 sums[ROWS];
    multiply<C, ROWS>(panel, columns, rows, sums);
    put<ROWS>(sums, out, out_stride, width, bias);
}

constexpr int DENSE_ROWS = MAX_ROWS;  // of a tile, that dense panels are multiplied with at once

// Panels that so many rows take at once: a sum waits for its last addition, and meanwhile others are added to.
constexpr int dense_panels(int rows) { return rows <= 4 ? 4 : 1; }

// PANELS dense panels, which are `apart` bytes from each other, times ROWS rows: x is [columns][stride] floats, one column
// of the tile after the other. Every output is one sum over the columns in their order.
template <class D, int ROWS, int PANELS>
static void product_dense(const uint8_t* panels, int64_t apart, int64_t columns, const float* x, int64_t stride, float* out,
                          int64_t out_stride, int64_t width, const float* bias) {
    __m512 sums[PANELS][ROWS];
    for (int p = 0; p < PANELS; ++p)
        for (int row = 0; row < ROWS; ++row) sums[p][row] = _mm512_setzero_ps();
    for (int64_t k = 0; k < columns; ++k) {
        __m512 weights[PANELS];
        for (int p = 0; p < PANELS; ++p) weights[p] = D::load16(panels + p * apart);
        panels += D::BYTES * PANEL;
        for (int row = 0; row < ROWS; ++row) {
            const __m512 value = _mm512_set1_ps(x[row]);
            for (int p = 0; p < PANELS; ++p) sums[p][row] = _mm512_fmadd_ps(weights[p], value, sums[p][row]);
        }
        x += stride;
    }
    for (int p = 0; p < PANELS; ++p) {
        const int64_t left = width - p * PANEL;
        put<ROWS>(sums[p], out + p * PANEL, out_stride, left < PANEL ? static_cast<int>(left) : PANEL,
                  bias ? bias + p * PANEL : nullptr);
    }
}

// The 32 inputs of a block.
struct Values {
    __m512 part[2];

    explicit inline Values(const float* x) : part{_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)} {}

    // The largest magnitude; not finite if one of them is not.
    inline float largest() const {
        if (_mm512_cmp_ps_mask(part[0], part[1], _CMP_UNORD_Q)) return __builtin_nanf("");
        return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(part[0]), _mm512_abs_ps(part[1])));
    }

    // Makes the first value of this magnitude zero; returns where it is.
    inline int drop(float size) {
        const __m512 sizes = _mm512_set1_ps(size);
        const uint32_t low = _mm512_cmpeq_ps_mask(_mm512_abs_ps(part[0]), sizes);
        const uint32_t high = _mm512_cmpeq_ps_mask(_mm512_abs_ps(part[1]), sizes);
        const int place = __builtin_ctz(low | high << 16);
        const uint32_t others = ~(1u << place);
        part[0] = _mm512_maskz_mov_ps(static_cast<__mmask16>(others), part[0]);
        part[1] = _mm512_maskz_mov_ps(static_cast<__mmask16>(others >> 16), part[1]);
        return place;
    }

    // Rounds a half; returns the sum of its codes.
    inline int round(int half, float inverse, int8_t* q) const {
        const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(part[half], _mm512_set1_ps(inverse)));
        const __m128i bytes = _mm512_cvtsepi32_epi8(codes);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q), bytes);
        const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
    }
};

}  // namespace TM_NS
