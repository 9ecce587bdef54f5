// The product of activations with packed matrices: quantizes the inputs once, then every thread takes panels.
//
// A row's result is computed by the same operations in the same order whatever other rows and threads there are.
#include "matrix.h"

#include "ops.h"
#include "thread_scratch.h"

#if TM_LEVEL >= TM_AMX
#include "matrix_amx.h"
#elif TM_LEVEL >= TM_AVX512
#include "matrix_avx512.h"
#elif TM_LEVEL >= TM_AVX2
#include "matrix_avx2.h"
#elif TM_LEVEL >= TM_NEON
#include "matrix_neon.h"
#else
#include "matrix_portable.h"
#endif

namespace TM_NS {

constexpr int64_t CACHED_PANELS = 256 << 10;  // bytes of panels that every tile is multiplied with before going on
constexpr int64_t OWN_INPUTS = 8 << 10;       // elements that each thread prepares for itself rather than waiting

using Product = void (*)(const uint8_t*, int64_t, const Rows&, float*, int64_t, int, const float*);
using ProductDense = void (*)(const uint8_t*, int64_t, int64_t, const float*, int64_t, float*, int64_t, int64_t, const float*);

struct Plan {
    int64_t m, k, groups, panels;
    bool quantized, dense;
};

static Plan plan_of(const MatmulArgs& a, int64_t rows) {
    Plan plan{rows_of(a.m, rows), a.k, a.k / GROUP, 0, false, false};
    for (int64_t s = 0; s < a.num_segments; ++s) {
        plan.panels += (a.segments[s].rows + PANEL - 1) / PANEL;
        (is_dense(static_cast<int>(a.segments[s].form)) ? plan.dense : plan.quantized) = true;
    }
    return plan;
}

// Inputs are prepared in both ways where segments of both kinds want them.
struct InputSizes {
    int64_t blocks = 0, outliers = 0, taken = 0, floats = 0;  // bytes

    explicit InputSizes(const Plan& plan) {
        if (plan.quantized) {
            const int64_t quads = (plan.m + QUAD - 1) / QUAD;
            blocks = round_up(plan.m * plan.groups * int64_t(sizeof(InputBlock)), 64);
            outliers = round_up(quads * most_outliers(plan.groups) * int64_t(sizeof(Outlier)), 64);
            taken = round_up(quads * int64_t(sizeof(int64_t)), 64);
        }
        if (plan.dense) floats = round_up(plan.m * plan.k * 4, 64);
    }
    size_t total() const { return static_cast<size_t>(blocks + outliers + taken + floats); }
};

static Inputs inputs_at(char* memory, const Plan& plan) {
    const InputSizes sizes(plan);
    char* const outliers = memory + sizes.blocks;
    char* const taken = outliers + sizes.outliers;
    return {reinterpret_cast<InputBlock*>(memory), reinterpret_cast<Outlier*>(outliers), reinterpret_cast<int64_t*>(taken),
            reinterpret_cast<float*>(taken + sizes.taken)};
}

static bool each_its_own(const Plan& plan) { return plan.m * plan.k <= OWN_INPUTS; }

// Of inputs that threads share. It grows with the rows, so a graph's scratch is enough for fewer rows and any threads.
static size_t matmul_scratch(const void* args, int64_t rows) {
    const Plan plan = plan_of(*static_cast<const MatmulArgs*>(args), rows);
    return each_its_own(plan) ? 0 : InputSizes(plan).total();
}

// Notes an outlier of a row among those of its group, [begin, end), which are in the order of their columns: in which
// order a row's products are added must not depend on the other rows. Returns the new end.
static Outlier* take_out(float x, int64_t group, int column, int row, Outlier* begin, Outlier* end) {
    const uint32_t place = static_cast<uint32_t>(column);
    Outlier* one = end;
    while (one > begin && one[-1].column >= place) --one;
    if (one == end || one->column != place) {
        for (Outlier* last = end++; last > one; --last) *last = last[-1];
        *one = {static_cast<uint32_t>(group), place, place / 4 % 4 * 64, place % 4 * 8 + (place / 4 & 4), {}};
    }
    one->x[row] = x;
    return end;
}

// Quantizes 32 inputs, of which `block.d` is the largest magnitude; those whose square is above the limit become outliers.
// Returns the end of their list.
static inline Outlier* quantize_block(const float* x, float limit, int64_t group, int row, InputBlock& block,
                                      Outlier* begin, Outlier* end) {
    float top = block.d, taken = 0;
    if (!(top <= LARGEST)) {
        spoil(block);
        return end;
    }
    Values values(x);
    for (int n = 0; n < MOST_OUTLIERS && top * top > limit; ++n) {
        const int column = values.drop(top);
        end = take_out(x[column], group, column, row, begin, end);
        taken += x[column];
        top = values.largest();
    }
    const bool some = top > SMALLEST;
    const float inverse = some ? 127.0f / top : 0.0f, d = some ? top * (1.0f / 127.0f) : 0.0f;
    const int half = values.round(0, inverse, block.q), sum = half + values.round(1, inverse, block.q + 16);
    block.d = d;
    block.sum = d * static_cast<float>(sum) + taken;
    block.minus_sum = -sum;
    block.minus_half = -half;
    return end;
}

// Quantizes up to QUAD rows to blocks that are `stride` apart from group to group; returns how many outliers there are.
static int64_t quantize_rows(const float* const x[QUAD], int rows, int64_t groups, InputBlock* blocks, int64_t stride,
                             Outlier* outliers) {
    float limits[QUAD];
    for (int row = 0; row < rows; ++row) {
        float squares = 0;
        for (int64_t g = 0; g < groups; ++g) {
            const float top = blocks[g * stride + row].d = Values(x[row] + g * GROUP).largest();
            squares += top * top;
        }
        limits[row] = OUTLIER_ABOVE * squares / static_cast<float>(groups);
    }
    Outlier* end = outliers;
    for (int64_t g = 0; g < groups; ++g) {
        Outlier* const begin = end;
        for (int row = 0; row < rows; ++row)
            end = quantize_block(x[row] + g * GROUP, limits[row], g, row, blocks[g * stride + row], begin, end);
    }
    return end - outliers;
}

// The rows of the quads [begin, end); row_at(row): where one is.
template <class RowAt>
static void prepare(const Plan& plan, const Inputs& to, int64_t begin, int64_t end, RowAt row_at) {
    for (int64_t quad = begin; quad < end; ++quad) {
        const int64_t first = quad * QUAD / TILE * TILE;  // of the tile
        const int64_t size = plan.m - first < TILE ? plan.m - first : TILE;
        const int64_t begin_row = quad * QUAD;
        const int rows = static_cast<int>(plan.m - begin_row < QUAD ? plan.m - begin_row : QUAD);
        const int place = static_cast<int>(begin_row - first);
        const float* x[QUAD];
        for (int row = 0; row < rows; ++row) x[row] = row_at(begin_row + row);
        if (plan.quantized) {
            InputBlock* const blocks = to.blocks + first * plan.groups + place;
            Outlier* const outliers = to.outliers + quad * most_outliers(plan.groups);
            to.taken[quad] = quantize_rows(x, rows, plan.groups, blocks, size, outliers);
        }
        for (int row = 0; plan.dense && row < rows; ++row) {
            float* floats = to.floats + first * plan.k + place + row;
            const float* const from = x[row];
            for (int64_t k = 0; k < plan.k; ++k) floats[k * size] = from[k];
        }
    }
}

template <class C>
static Product product_for(int rows) {
    switch (rows) {
        case 1: return product<C, 1>;
        case 2: return product<C, 2>;
        case 3: return product<C, 3>;
        case 4: return product<C, 4>;
#if TM_LEVEL >= TM_AVX512
        case 5: return product<C, 5>;
        case 6: return product<C, 6>;
        case 7: return product<C, 7>;
        case 8: return product<C, 8>;
        default: return product<C, 16>;
#else
        default: return product<C, 4>;
#endif
    }
}

constexpr int DENSE_PANELS = 4;  // at most, at once

// The product of so many rows and, of `panels`, the first `taken`.
template <class D, int ROWS>
static ProductDense dense_for(int64_t panels, int& taken) {
    constexpr int MOST = dense_panels(ROWS);
    taken = MOST >= 4 && panels >= 4 ? 4 : MOST >= 2 && panels >= 2 ? 2 : 1;
    if constexpr (MOST >= 4)
        if (taken == 4) return product_dense<D, ROWS, 4>;
    if constexpr (MOST >= 2)
        if (taken == 2) return product_dense<D, ROWS, 2>;
    return product_dense<D, ROWS, 1>;
}

template <class D>
static ProductDense dense_for(int rows, int64_t panels, int& taken) {
    switch (rows) {
        case 1: return dense_for<D, 1>(panels, taken);
        case 2: return dense_for<D, 2>(panels, taken);
        case 4: return dense_for<D, 4>(panels, taken);
#if TM_LEVEL >= TM_AVX512
        case 8: return dense_for<D, 8>(panels, taken);
#endif
        default: return dense_for<D, DENSE_ROWS>(panels, taken);
    }
}

static Product quantized_product(int64_t form, int rows) {
    return with_codes(form, [rows](auto codes) { return product_for<decltype(codes)>(rows); });
}

static ProductDense dense_product(int64_t form, int rows, int64_t panels, int& taken) {
    if (form == F32) return dense_for<DenseF32>(rows, panels, taken);
    return form == F16 ? dense_for<DenseF16>(rows, panels, taken) : dense_for<DenseBF16>(rows, panels, taken);
}

static int dense_rows_at_once(int64_t left) {
    int rows = left >= DENSE_ROWS ? DENSE_ROWS : MAX_ROWS;
    while (rows > left) rows /= 2;
    return rows;
}

// A few drafts more than a power of two must not cost a second pass over the codes.
static int rows_at_once(int64_t left) {
    if (left <= 4 || (left <= 8 && MAX_ROWS > 8)) return static_cast<int>(left);
    int rows = MAX_ROWS;
    while (rows > left) rows /= 2;
    return rows;
}

// Of a tile that begins with `first` and has `size` rows, those from `row` on.
static Rows rows_from(const Plan& plan, const Inputs& inputs, int64_t first, int64_t size, int64_t row) {
    const int64_t quad = (first + row) / QUAD, room = most_outliers(plan.groups);
    return {inputs.blocks + first * plan.groups + row, size, static_cast<int>(row % QUAD), inputs.outliers + quad * room,
            inputs.taken + quad, room};
}

// Where a panel lies, and what of the output is its.
struct Place {
    const uint8_t* packed;
    int64_t n;  // first column of the output
    int width;
    const float* bias;
};

static Place place_of(const MatmulArgs& a, const Plan& plan, const Segment& segment, int64_t panel, int64_t column) {
    const int64_t left = segment.rows - panel * PANEL, n = column + panel * PANEL;
    return {segment.panels + panel * panel_bytes(segment.form, plan.k), n, static_cast<int>(left < PANEL ? left : PANEL),
            a.bias ? a.bias + n : nullptr};
}

// One panel with one tile, whose first row is `first`.
static void multiply_tile(const MatmulArgs& a, const Plan& plan, const Inputs& inputs, const Segment& segment, int64_t panel,
                          int64_t column, int64_t first) {
    const auto [packed, n, width, bias] = place_of(a, plan, segment, panel, column);
    const int64_t size = plan.m - first < TILE ? plan.m - first : TILE;
    for (int64_t row = 0; row < size;) {
        const int rows = rows_at_once(size - row);
        float* out = a.out + (first + row) * a.out_stride + n;
        const Rows these = rows_from(plan, inputs, first, size, row);
        quantized_product(segment.form, rows)(packed, plan.k, these, out, a.out_stride, width, bias);
        row += rows;
    }
}

// The dense panels [begin, end) with one tile, a few at a time: its last rows find them in a near cache.
static void multiply_dense_tile(const MatmulArgs& a, const Plan& plan, const Inputs& inputs, const Segment& segment,
                                int64_t begin, int64_t end, int64_t column, int64_t first) {
    const int64_t size = plan.m - first < TILE ? plan.m - first : TILE, apart = panel_bytes(segment.form, plan.k);
    for (int64_t some = begin; some < end; some += DENSE_PANELS) {
        const int64_t stop = end - some < DENSE_PANELS ? end : some + DENSE_PANELS;
        for (int64_t row = 0; row < size;) {
            const int rows = dense_rows_at_once(size - row);
            const float* x = inputs.floats + first * plan.k + row;
            float* out = a.out + (first + row) * a.out_stride + column;
            int taken;
            for (int64_t panel = some; panel < stop; panel += taken) {
                const ProductDense product = dense_product(segment.form, rows, stop - panel, taken);
                const int64_t n = panel * PANEL, left = segment.rows - n;
                product(segment.panels + panel * apart, apart, plan.k, x, size, out + n, a.out_stride,
                        left < taken * PANEL ? left : taken * PANEL, a.bias ? a.bias + column + n : nullptr);
            }
            row += rows;
        }
    }
}

#if TM_LEVEL >= TM_AMX
// The panels [from, to) of a segment with all whole tiles; returns how many rows these have.
static int64_t multiply_whole_tiles(const MatmulArgs& a, const Plan& plan, const Inputs& inputs, const Segment& segment,
                                    int64_t from, int64_t to, int64_t column) {
    const int64_t whole = plan.m / TILE * TILE;
    if (is_dense(static_cast<int>(segment.form)) || from >= to || whole == 0) return 0;
    const auto product = with_codes(segment.form, [](auto codes) { return product_of_tiles<decltype(codes)>; });
    const TilesInUse tiles(SHAPES);
    for (int64_t first = 0; first < whole; first += TILES_AT_ONCE * TILE) {
        Rows rows[TILES_AT_ONCE];
        int count = 0;
        for (int64_t next = first; next < whole && count < TILES_AT_ONCE; next += TILE)
            rows[count++] = rows_from(plan, inputs, next, TILE, 0);
        for (int64_t panel = from; panel < to; ++panel) {
            const auto [packed, n, width, bias] = place_of(a, plan, segment, panel, column);
            product(packed, plan.k, rows, count, a.out + first * a.out_stride + n, a.out_stride, width, bias);
        }
    }
    return whole;
}
#endif

// The panels [begin, end), counted through all segments. A tile of inputs stays in the first-level cache for as many
// panels as stay in the second.
static void multiply_panels(const MatmulArgs& a, const Plan& plan, const Inputs& inputs, int64_t begin, int64_t end) {
    int64_t before = 0, column = 0;
    for (int64_t s = 0; s < a.num_segments; ++s) {
        const Segment& segment = a.segments[s];
        const int64_t panels = (segment.rows + PANEL - 1) / PANEL;
        const int64_t from = begin > before ? begin - before : 0, to = end - before < panels ? end - before : panels;
        int64_t done = 0;  // rows
#if TM_LEVEL >= TM_AMX
        done = multiply_whole_tiles(a, plan, inputs, segment, from, to, column);
#endif
        const int64_t step = plan.m > TILE ? CACHED_PANELS / panel_bytes(segment.form, plan.k) + 1 : panels;
        for (int64_t some = from; some < to; some += step)
            for (int64_t first = done; first < plan.m; first += TILE) {
                const int64_t stop = to - some < step ? to : some + step;
                if (is_dense(static_cast<int>(segment.form)))
                    multiply_dense_tile(a, plan, inputs, segment, some, stop, column, first);
                else
                    for (int64_t panel = some; panel < stop; ++panel)
                        multiply_tile(a, plan, inputs, segment, panel, column, first);
            }
        before += panels;
        column += segment.rows;
    }
}

static void matmul(const void* args, Team& team) {
    const MatmulArgs& a = *static_cast<const MatmulArgs*>(args);
    const Plan plan = plan_of(a, team.rows);
    const bool own = each_its_own(plan);
    const size_t own_floats = own ? InputSizes(plan).total() / sizeof(float) : 0;
    const Inputs inputs = inputs_at(own ? reinterpret_cast<char*>(thread_scratch(own_floats)) : team.scratch(), plan);
    const int64_t quads = (plan.m + QUAD - 1) / QUAD;
    const auto row_at = [&a](int64_t row) { return a.x + row * a.x_stride; };
    int64_t begin, end;
    if (own) {
        prepare(plan, inputs, 0, quads, row_at);
    } else {
        team.share(quads, begin, end);
        prepare(plan, inputs, begin, end, row_at);
        team.barrier();
    }
    team.share(plan.panels, begin, end);
    multiply_panels(a, plan, inputs, begin, end);
}

}  // namespace TM_NS

#include "experts.h"

namespace mill {
extern const OpEntry TM_OPS(matrix)[] = {
    {MATMUL, sizeof(MatmulArgs), ::TM_NS::matmul, ::TM_NS::matmul_scratch},
    {EXPERTS, sizeof(ExpertsArgs), ::TM_NS::experts, ::TM_NS::experts_scratch},
    {},
};
}
