// What LoRA adapters add to a product: tokens in tiles, of which those with the same adapter are computed together.
#include "low_rank.h"

#include "elementwise.h"
#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {
namespace {

constexpr int TILE = 4;            // tokens
constexpr int RANKS = 4;           // rows of down, of a unit of work
constexpr int64_t COLUMNS = 256;   // of out, of a unit of work

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// How many tokens from `first` on have its adapter, in a tile that ends before `end`.
int run_of(const int64_t* adapter, int64_t first, int64_t end) {
    int n = 1;
    while (first + n < end && n < TILE && adapter[first + n] == adapter[first]) n++;
    return n;
}

// R rows of down with N tokens: as many sums at once as keep the units busy.
template <int N, int R, class T>
void dots(const T* rows, const float* x, int64_t x_stride, int64_t columns, float* out, int64_t out_stride) {
    Vec sums[N][R] = {};
    int64_t k = 0;
    for (; k + W <= columns; k += W) {
        Vec w[R];
        for (int r = 0; r < R; r++) w[r] = load_wide(rows + r * columns + k);
        for (int t = 0; t < N; t++) {
            const Vec v = load(x + t * x_stride + k);
            for (int r = 0; r < R; r++) sums[t][r] += w[r] * v;
        }
    }
    for (int t = 0; t < N; t++)
        for (int r = 0; r < R; r++) {
            float total = sum(sums[t][r]);
            for (int64_t i = k; i < columns; i++) total += widen(rows[r * columns + i]) * x[t * x_stride + i];
            out[t * out_stride + r] = total;
        }
}

// M registers of columns of out for N tokens.
template <int N, int M, class T>
void widen_columns(const T* up, int64_t rows, int64_t used, const float* narrow, int64_t narrow_stride, float* out,
                   int64_t out_stride) {
    Vec sums[N][M];
    for (int t = 0; t < N; t++)
        for (int m = 0; m < M; m++) sums[t][m] = load(out + t * out_stride + m * W);
    for (int64_t r = 0; r < used; r++)
        for (int m = 0; m < M; m++) {
            const Vec w = load_wide(up + r * rows + m * W);
            for (int t = 0; t < N; t++) sums[t][m] += w * narrow[t * narrow_stride + r];
        }
    for (int t = 0; t < N; t++)
        for (int m = 0; m < M; m++) store(out + t * out_stride + m * W, sums[t][m]);
}

// Columns [first, last) of out for N tokens.
template <int N, class T>
void expand(const T* up, int64_t rows, int64_t used, const float* narrow, int64_t narrow_stride, float* out,
            int64_t out_stride, int64_t first, int64_t last) {
    constexpr int M = N > 2 ? 2 : 4;
    int64_t n = first;
    for (; n + M * W <= last; n += M * W)
        widen_columns<N, M>(up + n, rows, used, narrow, narrow_stride, out + n, out_stride);
    for (; n + W <= last; n += W) widen_columns<N, 1>(up + n, rows, used, narrow, narrow_stride, out + n, out_stride);
    for (; n < last; n++)
        for (int t = 0; t < N; t++)
            for (int64_t r = 0; r < used; r++)
                out[t * out_stride + n] += widen(up[r * rows + n]) * narrow[t * narrow_stride + r];
}

template <class F>
void for_runs(const LowRankArgs& a, int64_t tile, int64_t tokens, F&& body) {
    const int64_t last = tile * TILE + TILE < tokens ? tile * TILE + TILE : tokens;
    for (int64_t t = tile * TILE; t < last;) {
        const int n = run_of(a.adapter, t, last);
        if (a.adapter[t] >= 0) body(t, n, a.adapter[t]);
        t += n;
    }
}

template <int N, class T>
void rows_with(const T* rows, int64_t count, const float* x, const LowRankArgs& a, float* out, int64_t out_stride) {
    if (count == RANKS) return dots<N, RANKS>(rows, x, a.x_stride, a.columns, out, out_stride);
    for (int64_t r = 0; r < count; r++) dots<N, 1>(rows + r * a.columns, x, a.x_stride, a.columns, out + r, out_stride);
}

template <class T>
void add_low_rank(const LowRankArgs& a, Team& team) {
    const int64_t tokens = rows_of(a.tokens, team.rows), wide = a.sections * a.rank;
    bool any = false;
    for (int64_t t = 0; t < tokens && !any; t++) any = a.adapter[t] >= 0;
    if (!any) return;  // all members see the same
    float* narrow = reinterpret_cast<float*>(team.scratch());  // [tokens, sections * rank]
    const int64_t tiles = parts_of(tokens, TILE), blocks = a.sections * parts_of(a.rank, RANKS);
    for (int64_t unit; (unit = team.next()) < tiles * blocks;) {
        const int64_t block = unit % blocks, section = block % a.sections, first = block / a.sections * RANKS;
        for_runs(a, unit / blocks, tokens, [&](int64_t t, int n, int64_t slot) {
            const int64_t used = a.ranks[slot], end = first + RANKS < used ? first + RANKS : used;
            const T* row = static_cast<const T*>(a.down) + (slot * wide + section * a.rank + first) * a.columns;
            const float* x = a.x + t * a.x_stride;
            float* out = narrow + t * wide + section * a.rank + first;
            if (n == 4) rows_with<4>(row, end - first, x, a, out, wide);
            if (n == 3) rows_with<3>(row, end - first, x, a, out, wide);
            if (n == 2) rows_with<2>(row, end - first, x, a, out, wide);
            if (n == 1) rows_with<1>(row, end - first, x, a, out, wide);
        });
    }
    team.barrier();
    const int64_t parts = parts_of(a.rows, COLUMNS);
    for (int64_t unit; (unit = team.next()) < tiles * parts;) {
        const int64_t begin = unit % parts * COLUMNS, stop = begin + COLUMNS < a.rows ? begin + COLUMNS : a.rows;
        for_runs(a, unit / parts, tokens, [&](int64_t t, int n, int64_t slot) {
            const T* up = static_cast<const T*>(a.up) + slot * a.rank * a.rows;
            const int64_t used = a.ranks[slot];
            int64_t from = 0;
            for (int64_t section = 0; section < a.sections; section++) {
                const int64_t first = from > begin ? from : begin;
                const int64_t last = a.ends[section] < stop ? a.ends[section] : stop;
                from = a.ends[section];
                if (first >= last || !used) continue;
                const float* mine = narrow + t * wide + section * a.rank;
                float* out = a.out + t * a.out_stride;
                if (n == 4) expand<4>(up, a.rows, used, mine, wide, out, a.out_stride, first, last);
                if (n == 3) expand<3>(up, a.rows, used, mine, wide, out, a.out_stride, first, last);
                if (n == 2) expand<2>(up, a.rows, used, mine, wide, out, a.out_stride, first, last);
                if (n == 1) expand<1>(up, a.rows, used, mine, wide, out, a.out_stride, first, last);
            }
        });
    }
}

void run(const void* args, Team& team) {
    const auto& a = *static_cast<const LowRankArgs*>(args);
    if (a.storage == kFloat) add_low_rank<float>(a, team);
    if (a.storage == kHalf) add_low_rank<Half>(a, team);
    if (a.storage == kBrain) add_low_rank<Brain>(a, team);
}

size_t scratch(const void* args, int64_t rows) {
    const auto& a = *static_cast<const LowRankArgs*>(args);
    return static_cast<size_t>(rows_of(a.tokens, rows) * a.sections * a.rank) * sizeof(float);
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(low_rank)[] = {
    {kLowRank, sizeof(LowRankArgs), TM_NS::run, TM_NS::scratch},
    {},
};

}  // namespace mill
