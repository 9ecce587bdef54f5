// Products of packed panels with whole tiles of quantized inputs, for AMX; other rows are left to matrix_avx512.h.
//
// A group of a panel is a tile of 8 rows, or two of 4 where each half of a group has a scale; the same group of 16 rows of
// inputs is another; their product is 16 x 16 sums. Sums of integers are exact, and what is done with them is what
// matrix_avx512.h does, in the same order: a row has the same bits there and here.
#pragma once

#include "matrix_avx512.h"
#include "tiles.h"

namespace TM_NS {

constexpr int PIECE = 32;          // groups of a panel that are unpacked at a time: 20 KiB, for the first-level cache
constexpr int TILES_AT_ONCE = 16;  // of inputs that a panel is unpacked for: they stay in the second-level cache

// Two products are under way at a time.
enum Tile { SUMS_0, SUMS_1, INPUTS_0, INPUTS_1, CODES_0, CODES_1, HALF_INPUTS, HALF_CODES };

constexpr TileShapes shapes_of_tiles() {
    constexpr int BYTES[TILES] = {64, 64, GROUP, GROUP, 64, 64, GROUP / 2, 64};
    constexpr int ROWS[TILES] = {TILE, TILE, TILE, TILE, GROUP / 4, GROUP / 4, TILE, GROUP / 8};
    TileShapes shapes;
    for (int tile = 0; tile < TILES; ++tile) {
        shapes.bytes[tile] = static_cast<uint16_t>(BYTES[tile]);
        shapes.rows[tile] = static_cast<uint8_t>(ROWS[tile]);
    }
    return shapes;
}
constexpr TileShapes SHAPES = shapes_of_tiles();

// Groups of a panel as tiles take them, and their scales.
struct Piece {
    __m512i codes[PIECE][8];  // signed: without their zero point
    __m512 scale[PIECE], other[PIECE];
};

template <class C>
static inline void unpack_piece(const uint8_t* panel, int64_t first, int groups, Piece& piece) {
    for (int g = 0; g < groups; ++g) {
        const int in = static_cast<int>((first + g) % C::CHUNK);
        const uint8_t* at = panel + C::scales_at(first + g);
        if (in == 0) prefetch<C>(at);
        const ChunkScales<C> scales(at);
        piece.scale[g] = scales.scale(in);
        piece.other[g] = scales.other(in);
        unpack<C::BITS>(panel + C::codes_at(first + g), piece.codes[g]);
        if constexpr (C::HAS_ZERO) {
            const __m512i zero = _mm512_set1_epi8(static_cast<char>(1 << C::ZERO_SHIFT));
            for (__m512i& codes : piece.codes[g]) codes = _mm512_sub_epi8(codes, zero);
        }
    }
}

// sums[row] = the products of 16 rows of inputs with one group, or half of one.
template <int SUMS, int INPUTS, int CODES>
static inline void dot_of_tiles(const int8_t* q, const __m512i* codes, __m512i sums[TILE]) {
    tile_zero<SUMS>();
    tile_load<INPUTS>(q, sizeof(InputBlock));
    tile_load<CODES>(codes, 64);
    tile_dot<SUMS, INPUTS, CODES>();
    tile_store<SUMS>(sums, 64);
}

// Adds one group to the totals, as add_group does.
template <class C>
static inline void add_sums(const __m512i sums[TILE], __m512 scale, __m512 other, const InputBlock* blocks,
                            __m512 totals[TILE]) {
#pragma GCC unroll 16
    for (int row = 0; row < TILE; ++row) {
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[row]), scale);
        totals[row] = _mm512_fmadd_ps(sum, _mm512_set1_ps(blocks[row].d), totals[row]);
        if constexpr (!C::HAS_ZERO) totals[row] = _mm512_fmadd_ps(other, _mm512_set1_ps(blocks[row].sum), totals[row]);
    }
}

// The same for a group that has a scale for each half.
static inline void add_halves(const __m512i sums[TILE], const __m512i others[TILE], __m512 scale, __m512 other,
                              const InputBlock* blocks, __m512 totals[TILE]) {
#pragma GCC unroll 16
    for (int row = 0; row < TILE; ++row) {
        const __m512 first = _mm512_cvtepi32_ps(sums[row]), second = _mm512_cvtepi32_ps(others[row]);
        const __m512 both = _mm512_fmadd_ps(first, scale, _mm512_mul_ps(second, other));
        totals[row] = _mm512_fmadd_ps(both, _mm512_set1_ps(blocks[row].d), totals[row]);
    }
}

// Adds the groups of a piece; `blocks` are those of a tile, from the piece's first group on.
template <class C>
static inline void add_piece(const Piece& piece, int groups, const InputBlock* blocks, __m512 totals[TILE]) {
    __m512i sums[2][TILE];
    if constexpr (C::SCALES == K_SIXTEENTHS) {
        for (int g = 0; g < groups; ++g, blocks += TILE) {
            dot_of_tiles<SUMS_0, HALF_INPUTS, HALF_CODES>(blocks->q, piece.codes[g], sums[0]);
            dot_of_tiles<SUMS_1, HALF_INPUTS, HALF_CODES>(blocks->q + GROUP / 2, piece.codes[g] + 4, sums[1]);
            add_halves(sums[0], sums[1], piece.scale[g], piece.other[g], blocks, totals);
        }
    } else {
        for (int g = 0; g < groups; g += 2, blocks += 2 * TILE) {
            dot_of_tiles<SUMS_0, INPUTS_0, CODES_0>(blocks->q, piece.codes[g], sums[0]);
            if (g + 1 < groups) dot_of_tiles<SUMS_1, INPUTS_1, CODES_1>(blocks[TILE].q, piece.codes[g + 1], sums[1]);
            add_sums<C>(sums[0], piece.scale[g], piece.other[g], blocks, totals);
            if (g + 1 < groups) add_sums<C>(sums[1], piece.scale[g + 1], piece.other[g + 1], blocks + TILE, totals);
        }
    }
}

// A panel times `count` whole tiles of inputs, one below the other in the output. Where the panel takes more pieces than
// one, the output holds the totals in between.
template <class C>
static void product_of_tiles(const uint8_t* panel, int64_t columns, const Rows* tiles, int count, float* out,
                             int64_t out_stride, int width, const float* bias) {
    const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1);
    Piece piece;
    for (int64_t first = 0, all = columns / GROUP; first < all; first += PIECE) {
        const bool last = all - first <= PIECE;
        const int groups = last ? static_cast<int>(all - first) : PIECE;
        unpack_piece<C>(panel, first, groups, piece);
        for (int tile = 0; tile < count; ++tile) {
            float* const to = out + tile * TILE * out_stride;
            __m512 totals[TILE];
#pragma GCC unroll 16
            for (int row = 0; row < TILE; ++row)
                totals[row] = first ? _mm512_maskz_loadu_ps(mask, to + row * out_stride) : _mm512_setzero_ps();
            add_piece<C>(piece, groups, tiles[tile].blocks + first * TILE, totals);
            if (last) add_outliers<C, TILE>(panel, tiles[tile], totals);
            put<TILE>(totals, to, out_stride, width, last ? bias : nullptr);
        }
    }
}

}  // namespace TM_NS
