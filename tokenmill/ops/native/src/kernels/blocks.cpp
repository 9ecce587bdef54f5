// Weights as files store them: into panels, and into floats. What loading a model consists of.
#include "gguf_floats.h"
#include "matrix.h"
#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {

constexpr int WORDS = GROUP / 4;  // of four codes, in a row's group

// The words of a group, by vector and row.
struct Words {
    alignas(64) uint32_t at[WORDS][PANEL];
};

static inline void store16(uint8_t* to, const uint32_t words[PANEL]) { __builtin_memcpy(to, words, 4 * PANEL); }

// A group's codes, one in every byte, to the planes of the panel.
template <int BITS>
static inline void put_group(const Words& codes, uint8_t* group) {
    if constexpr (BITS == 8) {
        __builtin_memcpy(group, codes.at, sizeof codes.at);
        return;
    }
    for (int j = 0; j < 4; ++j) {
        uint32_t both[PANEL];
        for (int row = 0; row < PANEL; ++row)
            both[row] = (codes.at[j][row] & 0x0f0f0f0fu) | (codes.at[j + 4][row] & 0x0f0f0f0fu) << 4;
        store16(group + 64 * j, both);
    }
    if constexpr (BITS == 5)
        for (int j = 0; j < WORDS; ++j) {
            uint64_t bits = 0;
            for (int row = 0; row < PANEL; ++row) {  // the fifth bits of four codes, side by side
                const uint32_t four = (codes.at[j][row] >> 4 & 0x01010101u) * 0x01020408u >> 24;
                bits |= static_cast<uint64_t>(four & 15) << 4 * row;
            }
            __builtin_memcpy(group + 256 + 8 * j, &bits, 8);
        }
    if constexpr (BITS == 6)
        for (int h = 0; h < 2; ++h) {
            uint32_t high[PANEL];
            for (int row = 0; row < PANEL; ++row) {
                high[row] = 0;
                for (int f = 0; f < 4; ++f) high[row] |= (codes.at[4 * h + f][row] >> 4 & 0x03030303u) << 2 * f;
            }
            store16(group + 256 + 64 * h, high);
        }
}

static inline void put16(uint8_t* at, uint16_t value) { __builtin_memcpy(at, &value, 2); }

// The scales of block number b of all rows.
template <class F>
static inline void put_scales(const Block blocks[PANEL], int64_t b, uint8_t* panel) {
    using C = typename F::C;
    constexpr int64_t GROUPS = F::VALUES / GROUP;
    if constexpr (C::SCALES == SYMMETRIC) {
        for (int64_t g = b * GROUPS; g < (b + 1) * GROUPS; ++g)
            for (int row = 0; row < PANEL; ++row)
                put16(panel + C::scales_at(g) + g % C::CHUNK * 2 * PANEL + 2 * row, blocks[row].d);
        return;
    }
    uint8_t* scales = panel + C::scales_at(b * GROUPS);
    for (int row = 0; row < PANEL; ++row) {
        const Block& block = blocks[row];
        if constexpr (C::FLOAT_D)
            __builtin_memcpy(scales + 4 * row, &block.wide_d, 4);
        else
            put16(scales + 2 * row, block.d);
        if constexpr (C::SCALES == MINIMUM || C::SCALES == K_MINIMUM) put16(scales + 2 * PANEL + 2 * row, block.min);
        if constexpr (C::SCALES == K_SIXTEENTHS)
            for (int g = 0; g < 16; ++g) scales[SMALL_AT + g * PANEL + row] = block.scale[g];
        if constexpr (C::SCALES == K_MINIMUM)
            for (int g = 0; g < 8; ++g) {
                scales[SMALL_AT + g * PANEL + row] = block.scale[g];
                scales[SMALL_MINIMUMS_AT + g * PANEL + row] = block.low[g];
            }
    }
}

template <class F>
static void repack_blocks(const uint8_t* const* sources, const uint8_t* book, int64_t count, int rows, uint8_t* panel) {
    using C = typename F::C;
    constexpr int GROUPS = F::VALUES / GROUP;
    Block blocks[PANEL];
    __builtin_memset(blocks, 0, sizeof blocks);  // rows that are not there are zero
    for (int64_t b = 0; b < count; ++b) {
        for (int row = 0; row < rows; ++row) read_block<F>(sources[row] + b * F::BYTES, book, blocks[row]);
        for (int g = 0; g < GROUPS; ++g) {
            Words words;
            for (int row = 0; row < PANEL; ++row)
                for (int j = 0; j < WORDS; ++j) words.at[j][row] = read32(blocks[row].codes + GROUP * g + 4 * j);
            put_group<C::BITS>(words, panel + C::codes_at(b * GROUPS + g));
        }
        put_scales<F>(blocks, b, panel);
    }
}

// Formats whose nibbles or bytes lie in fours as panels want them.
template <class F, uint32_t FLIP>
static void repack_plain(const uint8_t* const* sources, int64_t count, int rows, uint8_t* panel) {
    using C = typename F::C;
    constexpr int HEAD = C::SCALES == MINIMUM ? 4 : 2;
    for (int64_t b = 0; b < count; ++b) {
        uint8_t *group = panel + C::codes_at(b), *scales = panel + C::scales_at(b);
        if constexpr (C::SCALES == SYMMETRIC) scales += b % C::CHUNK * 2 * PANEL;
        for (int row = 0; row < rows; ++row) {
            const uint8_t* from = sources[row] + b * F::BYTES;
            for (int j = 0; j < C::BITS; ++j) {
                const uint32_t four = read32(from + HEAD + 4 * j) ^ FLIP;
                __builtin_memcpy(group + 64 * j + 4 * row, &four, 4);
            }
            __builtin_memcpy(scales + 2 * row, from, 2);
            if constexpr (C::SCALES == MINIMUM) __builtin_memcpy(scales + 2 * PANEL + 2 * row, from + 2, 2);
        }
    }
}

// [16 rows][COUNT columns] -> [COUNT columns][16 rows]
template <class T, int COUNT>
static inline void transpose(const T* const* rows, T* out) {
    for (int k = 0; k < COUNT; ++k)
        for (int row = 0; row < PANEL; ++row) out[k * PANEL + row] = rows[row][k];
}

template <class T>
static void repack_dense(const uint8_t* const* sources, int64_t columns, int rows, uint8_t* panel) {
    constexpr int STEP = 64 / sizeof(T);  // a line of the cache of each row
    alignas(64) T lines[PANEL][STEP] = {};
    const T* from[PANEL];
    for (int row = 0; row < PANEL; ++row) from[row] = lines[row];
    for (int64_t k = 0; k < columns; k += STEP) {
        const int64_t count = columns - k < STEP ? columns - k : STEP;
        for (int row = 0; row < rows; ++row)
            __builtin_memcpy(lines[row], sources[row] + k * int64_t(sizeof(T)), static_cast<size_t>(count) * sizeof(T));
        T* out = reinterpret_cast<T*>(panel) + k * PANEL;
        if (count == STEP) {
            transpose<T, STEP>(from, out);
        } else {
            for (int64_t i = 0; i < count; ++i)
                for (int row = 0; row < PANEL; ++row) out[i * PANEL + row] = lines[row][i];
        }
    }
}

// What no form keeps becomes floats.
template <class F>
static void repack_wide(const uint8_t* const* sources, const uint8_t* book, int64_t count, int rows, uint8_t* panel) {
    alignas(64) float values[PANEL][F::VALUES];
    __builtin_memset(values, 0, sizeof values);
    const float* from[PANEL];
    for (int row = 0; row < PANEL; ++row) from[row] = values[row];
    for (int64_t b = 0; b < count; ++b) {
        for (int row = 0; row < rows; ++row) floats_of_blocks<F>(sources[row] + b * F::BYTES, book, 1, values[row]);
        transpose<float, F::VALUES>(from, reinterpret_cast<float*>(panel) + b * F::VALUES * PANEL);
    }
}

template <class F>
static inline void repack_one(const RepackArgs& a, const uint8_t* const* sources, int rows, uint8_t* panel) {
    using C = typename F::C;
    const int64_t count = a.columns / F::VALUES;
    if constexpr (IS_WIDE<C>) {
        repack_wide<F>(sources, a.book, count, rows, panel);
    } else {
        // Scales of a last chunk may be missing, as rows may be.
        for (int64_t g = 0; g < a.columns / GROUP; g += C::CHUNK)
            __builtin_memset(panel + C::scales_at(g), 0, C::SCALE_BYTES);
        constexpr bool PLAIN = C::SCALES <= MINIMUM && F::VALUES == GROUP && (F::BYTES == 18 || F::BYTES == 20 || F::BYTES == 34);
        if constexpr (PLAIN && C::BITS * 4 == F::BYTES - (C::SCALES == MINIMUM ? 4 : 2)) {
            if (rows < PANEL)
                for (int64_t g = 0; g < count; ++g) __builtin_memset(panel + C::codes_at(g), 0, C::GROUP_BYTES);
            repack_plain<F, C::BITS == 8 ? 0x80808080u : 0u>(sources, count, rows, panel);
        } else {
            repack_blocks<F>(sources, a.book, count, rows, panel);
        }
    }
}

// A format as both ops see it: how many bytes a row has, and what form it gets.
struct Shape {
    int64_t row_bytes;
    int64_t panel_bytes;
};

static Shape shape_of(int64_t format, int64_t columns) {
    Shape shape{};
    switch (format) {
        case GGUF_F32: return {4 * columns, panel_bytes(F32, columns)};
        case GGUF_F16: return {2 * columns, panel_bytes(F16, columns)};
        case GGUF_BF16: return {2 * columns, panel_bytes(BF16, columns)};
        default:
            with_format(format, [&](auto f) {
                using F = decltype(f);
                shape.row_bytes = columns / F::VALUES * F::BYTES;
                if constexpr (IS_WIDE<typename F::C>)
                    shape.panel_bytes = panel_bytes(F32, columns);
                else
                    shape.panel_bytes = F::C::panel_bytes(columns);
            });
            return shape;
    }
}

static void repack_panel(const RepackArgs& a, const Shape& shape, int64_t number) {
    uint8_t* panel = a.panels + number * shape.panel_bytes;
    const int64_t left = a.rows - number * PANEL;
    const int rows = left < PANEL ? static_cast<int>(left) : PANEL;
    const uint8_t* sources[PANEL];
    for (int row = 0; row < rows; ++row) {
        const int64_t from = number * PANEL + row;
        sources[row] = a.source + (a.order ? a.order[from] : from) * shape.row_bytes;
    }
    switch (a.format) {
        case GGUF_F32: return repack_dense<uint32_t>(sources, a.columns, rows, panel);
        case GGUF_F16:
        case GGUF_BF16: return repack_dense<uint16_t>(sources, a.columns, rows, panel);
        default: with_format(a.format, [&](auto f) { repack_one<decltype(f)>(a, sources, rows, panel); });
    }
}

static void repack(const void* args, Team& team) {
    const RepackArgs& a = *static_cast<const RepackArgs*>(args);
    const Shape shape = shape_of(a.format, a.columns);
    int64_t begin, end;
    team.share((a.rows + PANEL - 1) / PANEL, begin, end);
    for (int64_t panel = begin; panel < end; ++panel) repack_panel(a, shape, panel);
}

// How blocks of a format become floats.
struct Decoder {
    void (*floats)(const uint8_t* from, const uint8_t* book, int64_t count, float* out);
    int64_t values, bytes;  // of a block
};

template <class T>
static void widen_all(const uint8_t* from, const uint8_t*, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        T one;
        __builtin_memcpy(&one, from + i * int64_t(sizeof(T)), sizeof(T));
        out[i] = widen(one);
    }
}

static Decoder decoder_of(int64_t format) {
    Decoder decoder{};
    switch (format) {
        case GGUF_F32: return {widen_all<float>, 1, 4};
        case GGUF_F16: return {widen_all<Half>, 1, 2};
        case GGUF_BF16: return {widen_all<Brain>, 1, 2};
        default:
            with_format(format, [&](auto f) {
                using F = decltype(f);
                decoder = {floats_of_blocks<F>, F::VALUES, F::BYTES};
            });
            return decoder;
    }
}

template <class T>
static void unpack_row(const Decoder& decoder, const uint8_t* from, const uint8_t* book, int64_t columns, T* out) {
    constexpr int64_t STEP = 1024;  // a multiple of every block
    alignas(64) float values[STEP];
    for (int64_t k = 0; k < columns; k += STEP) {
        const int64_t count = columns - k < STEP ? columns - k : STEP;
        decoder.floats(from + k / decoder.values * decoder.bytes, book, count / decoder.values, values);
        for (int64_t i = 0; i < count; ++i) narrow(values[i], out + k + i);
    }
}

static void unpack(const void* args, Team& team) {
    const UnpackArgs& a = *static_cast<const UnpackArgs*>(args);
    const Decoder decoder = decoder_of(a.format);
    const int64_t bytes = a.columns / decoder.values * decoder.bytes;
    int64_t begin, end;
    team.share(a.rows, begin, end);
    for (int64_t row = begin; row < end; ++row) {
        const uint8_t* from = a.source + (a.order ? a.order[row] : row) * bytes;
        const int64_t at = row * a.columns;
        switch (a.storage) {
            case 0: decoder.floats(from, a.book, a.columns / decoder.values, static_cast<float*>(a.out) + at); break;
            case 1: unpack_row(decoder, from, a.book, a.columns, static_cast<Half*>(a.out) + at); break;
            default: unpack_row(decoder, from, a.book, a.columns, static_cast<Brain*>(a.out) + at);
        }
    }
}

}  // namespace TM_NS

extern const OpEntry TM_OPS(blocks)[] = {
    {REPACK, sizeof(RepackArgs), TM_NS::repack, nullptr},
    {UNPACK, sizeof(UnpackArgs), TM_NS::unpack, nullptr},
    {},
};

}  // namespace mill
