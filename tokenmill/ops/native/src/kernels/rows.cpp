// Rows of packed matrices: from the blocks of a file into panels, and from panels back to floats.
#include "half.h"
#include "matrix.h"
#include "ops.h"

namespace TM_NS {

using namespace mill;

// What a file's block of 32 or 256 values holds: unsigned codes in order, and scales in the panel's terms.
struct Block {
    uint8_t codes[SUPER];
    uint16_t d, min;            // f16 bits
    uint8_t scale[16], low[8];  // of groups within 256
};

static int64_t block_values(int form) { return is_dense(form) ? 1 : column_step(form); }

static int64_t source_bytes(int form) {
    switch (form) {
        case F32: return 4;
        case F16:
        case BF16: return 2;
        case INT4: return 18;
        case INT4_MIN: return 20;
        case INT4_K: return 144;
        case INT5: return 22;
        case INT5_MIN: return 24;
        case INT5_K: return 176;
        case INT6_K: return 210;
        default: return 34;
    }
}

static void nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = from[i] & 15;
        codes[16 + i] = from[i] >> 4;
    }
}

static void add_fifth(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((bits[i / 8] >> i % 8 & 1) << 4);
}

// The 6-bit scales and minimums of Q4_K and Q5_K.
static void k_scales(const uint8_t* s, Block& out) {
    for (int j = 0; j < 4; ++j) {
        out.scale[j] = s[j] & 63;
        out.low[j] = s[j + 4] & 63;
        out.scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
        out.low[j + 4] = static_cast<uint8_t>(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
    }
}

static void k_codes(const uint8_t* from, const uint8_t* fifth, Block& out) {
    for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 32; ++i) {
            const uint8_t byte = from[32 * (j / 2) + i];
            out.codes[32 * j + i] = static_cast<uint8_t>((j % 2 ? byte >> 4 : byte & 15) |
                                                         (fifth ? (fifth[i] >> j & 1) << 4 : 0));
        }
}

static void q6_codes(const uint8_t* from, Block& out) {
    const uint8_t *low = from, *high = from + 128;
    for (int half = 0; half < 2; ++half, low += 64, high += 32)
        for (int quarter = 0; quarter < 4; ++quarter)
            for (int i = 0; i < 32; ++i) {
                const uint8_t byte = low[32 * (quarter % 2) + i];
                out.codes[128 * half + 32 * quarter + i] =
                    static_cast<uint8_t>((quarter < 2 ? byte & 15 : byte >> 4) | (high[i] >> 2 * quarter & 3) << 4);
            }
}

static void read_block(int form, const uint8_t* from, Block& out) {
    switch (form) {
        case INT4:
            out.d = read16(from);
            nibbles(from + 2, out.codes);
            break;
        case INT4_MIN:
            out.d = read16(from);
            out.min = read16(from + 2);
            nibbles(from + 4, out.codes);
            break;
        case INT5:
            out.d = read16(from);
            nibbles(from + 6, out.codes);
            add_fifth(from + 2, out.codes);
            break;
        case INT5_MIN:
            out.d = read16(from);
            out.min = read16(from + 2);
            nibbles(from + 8, out.codes);
            add_fifth(from + 4, out.codes);
            break;
        case INT4_K:
        case INT5_K:
            out.d = read16(from);
            out.min = read16(from + 2);
            k_scales(from + 4, out);
            k_codes(from + (form == INT4_K ? 16 : 48), form == INT4_K ? nullptr : from + 16, out);
            break;
        case INT6_K:
            q6_codes(from, out);
            __builtin_memcpy(out.scale, from + 192, 16);
            out.d = read16(from + 208);
            break;
        default:
            out.d = read16(from);
            for (int i = 0; i < 32; ++i) out.codes[i] = from[2 + i] ^ 0x80;
    }
}

// Codes of one row of one group to their places; the bits must be zero before.
static void put_codes(int bits, const uint8_t* codes, int row, uint8_t* group) {
    for (int column = 0; column < GROUP; ++column) {
        const int j = column / 4, byte = 4 * row + column % 4;
        const uint8_t code = codes[column];
        if (bits == 8) {
            group[64 * j + byte] = code;
            continue;
        }
        group[64 * (j % 4) + byte] |= static_cast<uint8_t>((code & 15) << (j < 4 ? 0 : 4));
        if (bits == 5) group[256 + 8 * j + byte / 8] |= static_cast<uint8_t>((code >> 4) << byte % 8);
        if (bits == 6) group[256 + 64 * (j / 4) + byte] |= static_cast<uint8_t>((code >> 4) << 2 * (j % 4));
    }
}

static void get_codes(int bits, const uint8_t* group, int row, uint8_t* codes) {
    for (int column = 0; column < GROUP; ++column) {
        const int j = column / 4, byte = 4 * row + column % 4;
        if (bits == 8) {
            codes[column] = group[64 * j + byte];
            continue;
        }
        int code = group[64 * (j % 4) + byte] >> (j < 4 ? 0 : 4) & 15;
        if (bits == 5) code |= (group[256 + 8 * j + byte / 8] >> byte % 8 & 1) << 4;
        if (bits == 6) code |= (group[256 + 64 * (j / 4) + byte] >> 2 * (j % 4) & 3) << 4;
        codes[column] = static_cast<uint8_t>(code);
    }
}

static void put16(uint8_t* at, uint16_t value) {
    at[0] = static_cast<uint8_t>(value);
    at[1] = static_cast<uint8_t>(value >> 8);
}

// Block number b of a row, to the panel.
template <class C>
static void put_block(const Block& block, int64_t b, int row, uint8_t* panel) {
    constexpr int64_t GROUPS = C::SCALES <= MINIMUM ? 1 : SUPER / GROUP;  // of a block
    for (int64_t g = 0; g < GROUPS; ++g)
        put_codes(C::BITS, block.codes + g * GROUP, row, panel + C::codes_at(b * GROUPS + g));
    uint8_t* scales = panel + C::scales_at(b * GROUPS);
    if constexpr (C::SCALES == SYMMETRIC) scales += b % C::CHUNK * 2 * PANEL;
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

// The common formats of small models, whose nibbles or bytes lie in four's as panels want them.
template <class C>
static bool put_fast(const uint8_t* from, int64_t b, int row, uint8_t* panel) {
    if constexpr (C::SCALES > MINIMUM || (C::BITS != 4 && C::BITS != 8)) return false;
    constexpr int HEAD = C::SCALES == MINIMUM ? 4 : 2;
    uint8_t* group = panel + C::codes_at(b) + 4 * row;
    for (int j = 0; j < C::BITS; ++j) {
        uint32_t four;
        __builtin_memcpy(&four, from + HEAD + 4 * j, 4);
        if constexpr (C::BITS == 8) four ^= 0x80808080u;
        __builtin_memcpy(group + 64 * j, &four, 4);
    }
    uint8_t* scales = panel + C::scales_at(b) + (C::SCALES == SYMMETRIC ? b % C::CHUNK * 2 * PANEL : 0);
    __builtin_memcpy(scales + 2 * row, from, 2);
    if constexpr (C::SCALES == MINIMUM) __builtin_memcpy(scales + 2 * PANEL + 2 * row, from + 2, 2);
    return true;
}

template <class C>
static void repack_rows(int form, const uint8_t* const* sources, int64_t blocks, int rows, uint8_t* panel) {
    const int64_t size = source_bytes(form);
    Block block;
    for (int64_t b = 0; b < blocks; ++b)
        for (int row = 0; row < rows; ++row) {
            const uint8_t* from = sources[row] + b * size;
            if (put_fast<C>(from, b, row, panel)) continue;
            read_block(form, from, block);
            put_block<C>(block, b, row, panel);
        }
}

static void repack_dense(int form, const uint8_t* const* sources, int64_t columns, int rows, uint8_t* panel) {
    const auto size = static_cast<size_t>(source_bytes(form));
    for (int64_t k = 0; k < columns; ++k)
        for (int row = 0; row < rows; ++row)
            __builtin_memcpy(panel + (k * PANEL + row) * size, sources[row] + k * size, size);
}

static void repack_panel(const RepackArgs& a, int64_t number) {
    const int form = static_cast<int>(a.form);
    const int64_t bytes = panel_bytes(form, a.columns), blocks = a.columns / block_values(form);
    uint8_t* panel = a.panels + number * bytes;
    __builtin_memset(panel, 0, static_cast<size_t>(bytes));
    const int64_t left = a.rows - number * PANEL;
    const int rows = left < PANEL ? static_cast<int>(left) : PANEL;
    const uint8_t* sources[PANEL];
    for (int row = 0; row < rows; ++row) {
        const int64_t from = number * PANEL + row;
        sources[row] = a.source + (a.order ? a.order[from] : from) * blocks * source_bytes(form);
    }
    if (is_dense(form)) return repack_dense(form, sources, a.columns, rows, panel);
    with_codes(form, [&](auto codes) { repack_rows<decltype(codes)>(form, sources, blocks, rows, panel); });
}

static void repack(const void* args, Team& team) {
    const RepackArgs& a = *static_cast<const RepackArgs*>(args);
    int64_t begin, end;
    team.share((a.rows + PANEL - 1) / PANEL, begin, end);
    for (int64_t panel = begin; panel < end; ++panel) repack_panel(a, panel);
}

static void dense_row(int form, const uint8_t* panel, int row, int64_t columns, float* out) {
    for (int64_t k = 0; k < columns; ++k) {
        const int64_t at = k * PANEL + row;
        if (form == F32)
            __builtin_memcpy(out + k, panel + 4 * at, 4);
        else
            out[k] = form == F16 ? half_at(panel + 2 * at) : brain_at(panel + 2 * at);
    }
}

// Scale and minimum of half a group (16 columns).
template <class C>
static void scale_of(const uint8_t* panel, int64_t g, int half, int row, float& scale, float& minimum) {
    const uint8_t* at = panel + C::scales_at(g);
    const int64_t in = g % C::CHUNK;
    minimum = 0;
    scale = half_at(at + (C::SCALES == SYMMETRIC ? in * 2 * PANEL : 0) + 2 * row);
    if constexpr (C::SCALES == MINIMUM) minimum = half_at(at + 2 * PANEL + 2 * row);
    if constexpr (C::SCALES == K_SIXTEENTHS)
        scale *= static_cast<float>(static_cast<int8_t>(at[SMALL_AT + (2 * in + half) * PANEL + row]));
    if constexpr (C::SCALES == K_MINIMUM) {
        scale *= static_cast<float>(at[SMALL_AT + in * PANEL + row]);
        minimum = -half_at(at + 2 * PANEL + 2 * row) * static_cast<float>(at[SMALL_MINIMUMS_AT + in * PANEL + row]);
    }
}

template <class C>
static void packed_row(const uint8_t* panel, int row, int64_t columns, float* out) {
    constexpr int ZERO = C::HAS_ZERO ? 1 << C::ZERO_SHIFT : 0;
    for (int64_t g = 0; g < columns / GROUP; ++g) {
        uint8_t codes[GROUP];
        get_codes(C::BITS, panel + C::codes_at(g), row, codes);
        for (int half = 0; half < 2; ++half) {
            float scale, minimum;
            scale_of<C>(panel, g, half, row, scale, minimum);
            for (int i = 16 * half; i < 16 * half + 16; ++i)
                out[g * GROUP + i] = scale * static_cast<float>(codes[i] - ZERO) + minimum;
        }
    }
}

static void take_row(const TakeRowsArgs& a, int64_t id, float* out) {
    for (int64_t s = 0; s < a.num_segments && id >= 0; ++s) {
        const Segment& segment = a.segments[s];
        if (id < segment.rows) {
            const int form = static_cast<int>(segment.form);
            const uint8_t* panel = segment.panels + id / PANEL * panel_bytes(form, a.k);
            const int row = static_cast<int>(id % PANEL);
            if (is_dense(form)) return dense_row(form, panel, row, a.k, out);
            return with_codes(form, [&](auto codes) { packed_row<decltype(codes)>(panel, row, a.k, out); });
        }
        id -= segment.rows;
    }
    __builtin_memset(out, 0, static_cast<size_t>(a.k) * 4);
}

static void take_rows(const void* args, Team& team) {
    const TakeRowsArgs& a = *static_cast<const TakeRowsArgs*>(args);
    int64_t begin, end;
    team.share(rows_of(a.m, team.rows), begin, end);
    for (int64_t i = begin; i < end; ++i) take_row(a, a.ids[i], a.out + i * a.out_stride);
}

}  // namespace TM_NS

namespace mill {
extern const OpEntry TM_OPS(rows)[] = {
    {REPACK, sizeof(RepackArgs), TM_NS::repack, nullptr},
    {TAKE_ROWS, sizeof(TakeRowsArgs), TM_NS::take_rows, nullptr},
    {},
};
}
