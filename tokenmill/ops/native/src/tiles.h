// Tile registers: the instructions of AMX, or where TM_STAND_IN is defined, which only tests do, a model that any CPU runs.
//
// Instructions are written out, so that a compiler need not know them, only its assembler. A tile has up to 16 rows of
// up to 64 bytes. In a product of bytes, four neighbours of a row of the first factor meet four of the second: those of
// its columns 4 n to 4 n + 3, which is how panels lie (formats.h).
#pragma once

#include <cstdint>

namespace TM_NS {

constexpr int TILES = 8;

// As the instruction reads it.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row, by tile
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "the instruction reads 64 bytes");

#if !defined(TM_STAND_IN)

static inline void tile_configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }

static inline void tile_release() { __asm__ volatile("tilerelease"); }

template <int T>
static inline void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}

template <int T>
static inline void tile_load(const void* at, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "i"(T) : "memory");
}

template <int T>
static inline void tile_store(void* at, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "i"(T) : "memory");
}

// SUM += A times B, of signed bytes.
template <int SUM, int A, int B>
static inline void tile_dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

#else

struct TileModel {
    TileShapes shapes;
    uint8_t data[TILES][16][64];
    bool configured;
};
static thread_local TileModel tile_model;

// What the CPU refuses ends the program.
static inline void tile_check(bool allowed) {
    if (!allowed) __builtin_trap();
}

static inline void tile_configure(const TileShapes& shapes) {
    tile_check(shapes.palette == 1 && shapes.start_row == 0);
    for (const uint8_t byte : shapes.reserved) tile_check(byte == 0);
    for (int tile = 0; tile < 16; ++tile) {
        const int rows = shapes.rows[tile], bytes = shapes.bytes[tile];
        tile_check(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0) && (tile < TILES || rows == 0));
    }
    tile_model = {};
    tile_model.shapes = shapes;
    tile_model.configured = true;
}

static inline void tile_release() { tile_model = {}; }

static inline void tile_usable(int tile) {
    tile_check(tile < TILES && tile_model.configured && tile_model.shapes.rows[tile] > 0);
}

template <int T>
static inline void tile_zero() {
    tile_usable(T);
    __builtin_memset(tile_model.data[T], 0, sizeof(tile_model.data[T]));
}

template <int T>
static inline void tile_load(const void* at, int64_t stride) {
    tile_zero<T>();
    for (int row = 0; row < tile_model.shapes.rows[T]; ++row)
        __builtin_memcpy(tile_model.data[T][row], static_cast<const uint8_t*>(at) + row * stride,
                         tile_model.shapes.bytes[T]);
}

template <int T>
static inline void tile_store(void* at, int64_t stride) {
    tile_usable(T);
    for (int row = 0; row < tile_model.shapes.rows[T]; ++row)
        __builtin_memcpy(static_cast<uint8_t*>(at) + row * stride, tile_model.data[T][row],
                         tile_model.shapes.bytes[T]);
}

template <int SUM, int A, int B>
static inline void tile_dot() {
    const TileShapes& shapes = tile_model.shapes;
    tile_usable(SUM), tile_usable(A), tile_usable(B);
    tile_check(SUM != A && SUM != B && A != B);
    tile_check(shapes.bytes[A] % 4 == 0 && shapes.bytes[A] / 4 == shapes.rows[B] && shapes.rows[SUM] == shapes.rows[A]);
    tile_check(shapes.bytes[B] % 4 == 0 && shapes.bytes[SUM] == shapes.bytes[B]);
    for (int row = 0; row < shapes.rows[SUM]; ++row)
        for (int column = 0; column < shapes.bytes[SUM] / 4; ++column) {
            int32_t sum;
            __builtin_memcpy(&sum, tile_model.data[SUM][row] + 4 * column, 4);
            for (int i = 0; i < shapes.bytes[A]; ++i)
                sum += static_cast<int8_t>(tile_model.data[A][row][i]) *
                       static_cast<int8_t>(tile_model.data[B][i / 4][4 * column + i % 4]);
            __builtin_memcpy(tile_model.data[SUM][row] + 4 * column, &sum, 4);
        }
}

#endif

// Tiles are configured as long as this lives. Afterwards they are empty again, and a switch to another thread need not
// save them.
struct TilesInUse {
    explicit inline TilesInUse(const TileShapes& shapes) { tile_configure(shapes); }
    TilesInUse(const TilesInUse&) = delete;
    inline ~TilesInUse() { tile_release(); }
};

}  // namespace TM_NS
