// Rows of packed matrices as floats.
#include "half.h"
#include "matrix.h"
#include "ops.h"

namespace TM_NS {

using namespace mill;

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
    if constexpr (C::FLOAT_D)
        __builtin_memcpy(&scale, at + 4 * row, 4);
    else
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
    for (int64_t i = begin; i < end; ++i) take_row(a, a.ids[i] - a.first, a.out + i * a.out_stride);
}

}  // namespace TM_NS

namespace mill {
extern const OpEntry TM_OPS(rows)[] = {
    {TAKE_ROWS, sizeof(TakeRowsArgs), TM_NS::take_rows, nullptr},
    {},
};
}
