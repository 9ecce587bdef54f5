// What LoRA adapters add to a product: tokens with the same adapter are computed together, in tiles.
#include "low_rank.h"

#include "elementwise.h"
#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {
namespace {

constexpr int TILE = 4;           // tokens with one adapter
constexpr int RANKS = 16;         // rows of down, of a unit of work
constexpr int AHEAD = 512;
constexpr int64_t COLUMNS = 512;  // of out, of a unit of work

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Tokens with the same adapter stand in different places of a step: its factors are read once for all of them.
struct Tile {
    int32_t first, count;  // in `order`
};

struct Room {
    float* narrow;   // [tokens, sections * rank], as in `order`
    Tile* tiles;     // [tokens]
    int32_t* order;  // [tokens]: those that have adapters
    int32_t* runs;   // [tokens + 1]: where neighbours with the same adapter begin
    int64_t* count;  // of tiles
};

Room room(char* scratch, int64_t tokens, int64_t wide) {
    Room r;
    r.count = reinterpret_cast<int64_t*>(scratch);
    r.narrow = reinterpret_cast<float*>(r.count + 8);
    r.tiles = reinterpret_cast<Tile*>(r.narrow + tokens * wide);
    r.order = reinterpret_cast<int32_t*>(r.tiles + tokens);
    r.runs = r.order + tokens;
    return r;
}

size_t room_bytes(int64_t tokens, int64_t wide) {
    return 64 + static_cast<size_t>(tokens) * (wide * sizeof(float) + sizeof(Tile) + 2 * sizeof(int32_t)) + 4;
}

void sort_tokens(const int64_t* adapter, int64_t tokens, const Room& r) {
    int64_t runs = 0, placed = 0, tiles = 0;
    for (int64_t t = 0; t < tokens; t++)
        if (!t || adapter[t] != adapter[t - 1]) r.runs[runs++] = int32_t(t);
    r.runs[runs] = int32_t(tokens);
    for (int64_t i = 0; i < runs; i++) {
        const int64_t slot = adapter[r.runs[i] & INT32_MAX];
        if (r.runs[i] < 0 || slot < 0) continue;
        const int64_t begin = placed;
        for (int64_t j = i; j < runs; j++) {
            const int32_t first = r.runs[j];
            if (first < 0 || adapter[first] != slot) continue;
            const int32_t end = r.runs[j + 1] & INT32_MAX;
            for (int32_t t = first; t < end; t++) r.order[placed++] = t;
            r.runs[j] = first | INT32_MIN;  // taken
        }
        for (int64_t t = begin; t < placed; t += TILE)
            r.tiles[tiles++] = {int32_t(t), int32_t(t + TILE < placed ? TILE : placed - t)};
    }
    *r.count = tiles;
}

// R rows of down with N tokens. A sum is taken in the same order whatever N and R are.
template <int N, int R, class T>
void dots(const T* rows, const float* const* x, int64_t columns, float* out, int64_t out_stride) {
    static_assert(N * R <= W);
    Vec sums[N][R] = {};
    int64_t k = 0;
    for (; k + W <= columns; k += W) {
        Vec w[R];
        for (int r = 0; r < R; r++) {
            w[r] = load_wide(rows + r * columns + k);
            if (R > 2) __builtin_prefetch(rows + (R + r) * columns + k);
        }
        for (int t = 0; t < N; t++) {
            const Vec v = load(x[t] + k);
            for (int r = 0; r < R; r++) sums[t][r] += w[r] * v;
        }
    }
    Vec flat[W] = {}, quads[W / 4];
    for (int t = 0; t < N; t++)
        for (int r = 0; r < R; r++) flat[t * R + r] = sums[t][r];
    for (int i = 0; i < W; i += 4) quads[i / 4] = sum_quad(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]);
    const Vec joined = join_quads(quads);
    for (int t = 0; t < N; t++)
        for (int r = 0; r < R; r++) {
            float total = joined[t * R + r];
            for (int64_t i = k; i < columns; i++) total += widen(rows[r * columns + i]) * x[t][i];
            out[t * out_stride + r] = total;
        }
}

// The same of any number of rows.
template <int N, class T>
void all_dots(const T* rows, int64_t count, const float* const* x, int64_t columns, float* out, int64_t out_stride) {
    constexpr int MOST = W / N > RANKS ? RANKS : W / N;
    int64_t r = 0;
    for (; r + MOST <= count; r += MOST) dots<N, MOST>(rows + r * columns, x, columns, out + r, out_stride);
    if constexpr (MOST >= 8)
        for (; r + MOST / 2 <= count; r += MOST / 2)
            dots<N, MOST / 2>(rows + r * columns, x, columns, out + r, out_stride);
    if constexpr (MOST >= 4)
        for (; r + 2 <= count; r += 2) dots<N, 2>(rows + r * columns, x, columns, out + r, out_stride);
    for (; r < count; r++) dots<N, 1>(rows + r * columns, x, columns, out + r, out_stride);
}

// M registers of columns of out for N tokens.
template <int N, int M, class T>
void widen_columns(const T* up, int64_t rows, int64_t used, const float* narrow, int64_t narrow_stride,
                   float* const* out, int64_t n) {
    Vec sums[N][M];
    for (int t = 0; t < N; t++)
        for (int m = 0; m < M; m++) sums[t][m] = load(out[t] + n + m * W);
    for (int64_t r = 0; r < used; r++) {
        for (size_t at = 0; at < M * W * sizeof(T); at += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(up + r * rows + n) + AHEAD + at);
        for (int m = 0; m < M; m++) {
            const Vec w = load_wide(up + r * rows + n + m * W);
            for (int t = 0; t < N; t++) sums[t][m] += w * narrow[t * narrow_stride + r];
        }
    }
    for (int t = 0; t < N; t++)
        for (int m = 0; m < M; m++) store(out[t] + n + m * W, sums[t][m]);
}

// Columns [first, last) of out for N tokens.
template <int N, class T>
void expand(const T* up, int64_t rows, int64_t used, const float* narrow, int64_t narrow_stride, float* const* out,
            int64_t first, int64_t last) {
    constexpr int M = N > 2 ? 2 : 4;
    int64_t n = first;
    for (; n + M * W <= last; n += M * W) widen_columns<N, M>(up, rows, used, narrow, narrow_stride, out, n);
    for (; n + W <= last; n += W) widen_columns<N, 1>(up, rows, used, narrow, narrow_stride, out, n);
    for (; n < last; n++)
        for (int t = 0; t < N; t++)
            for (int64_t r = 0; r < used; r++)
                out[t][n] += widen(up[r * rows + n]) * narrow[t * narrow_stride + r];
}

template <int N, class T>
void narrow_tile(const LowRankArgs& a, const Room& room, Tile tile, int64_t section, int64_t first) {
    const float* x[N];
    for (int t = 0; t < N; t++) x[t] = a.x + room.order[tile.first + t] * a.x_stride;
    const int64_t slot = a.adapter[room.order[tile.first]], used = a.ranks[slot], wide = a.sections * a.rank;
    const int64_t end = first + RANKS < used ? first + RANKS : used;
    const T* rows = static_cast<const T*>(a.down) + (slot * wide + section * a.rank + first) * a.columns;
    float* out = room.narrow + tile.first * wide + section * a.rank + first;
    if (first < end) all_dots<N>(rows, end - first, x, a.columns, out, wide);
}

template <int N, class T>
void widen_tile(const LowRankArgs& a, const Room& room, Tile tile, int64_t begin, int64_t stop) {
    float* out[N];
    for (int t = 0; t < N; t++) out[t] = a.out + room.order[tile.first + t] * a.out_stride;
    const int64_t slot = a.adapter[room.order[tile.first]], used = a.ranks[slot], wide = a.sections * a.rank;
    const T* up = static_cast<const T*>(a.up) + slot * a.rank * a.rows;
    int64_t from = 0;
    for (int64_t section = 0; section < a.sections && used; section++) {
        const int64_t first = from > begin ? from : begin, last = a.ends[section] < stop ? a.ends[section] : stop;
        from = a.ends[section];
        const float* mine = room.narrow + tile.first * wide + section * a.rank;
        if (first < last) expand<N>(up, a.rows, used, mine, wide, out, first, last);
    }
}

template <class T>
void add_low_rank(const LowRankArgs& a, Team& team) {
    const int64_t tokens = rows_of(a.tokens, team.rows);
    bool any = false;
    for (int64_t t = 0; t < tokens && !any; t++) any = a.adapter[t] >= 0;
    if (!any) return;  // all members see the same
    const Room r = room(team.scratch(), tokens, a.sections * a.rank);
    if (team.index == 0) sort_tokens(a.adapter, tokens, r);
    team.barrier();
    const int64_t tiles = *r.count, blocks = a.sections * parts_of(a.rank, RANKS);
    for (int64_t unit; (unit = team.next()) < tiles * blocks;) {
        const int64_t block = unit % blocks, section = block / parts_of(a.rank, RANKS);
        const int64_t first = block % parts_of(a.rank, RANKS) * RANKS;
        const Tile tile = r.tiles[unit / blocks];
        if (tile.count == 4) narrow_tile<4, T>(a, r, tile, section, first);
        if (tile.count == 3) narrow_tile<3, T>(a, r, tile, section, first);
        if (tile.count == 2) narrow_tile<2, T>(a, r, tile, section, first);
        if (tile.count == 1) narrow_tile<1, T>(a, r, tile, section, first);
    }
    team.barrier();
    const int64_t parts = parts_of(a.rows, COLUMNS);
    for (int64_t unit; (unit = team.next()) < tiles * parts;) {
        const int64_t begin = unit % parts * COLUMNS, stop = begin + COLUMNS < a.rows ? begin + COLUMNS : a.rows;
        const Tile tile = r.tiles[unit / parts];
        if (tile.count == 4) widen_tile<4, T>(a, r, tile, begin, stop);
        if (tile.count == 3) widen_tile<3, T>(a, r, tile, begin, stop);
        if (tile.count == 2) widen_tile<2, T>(a, r, tile, begin, stop);
        if (tile.count == 1) widen_tile<1, T>(a, r, tile, begin, stop);
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
    return room_bytes(rows_of(a.tokens, rows), a.sections * a.rank);
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(low_rank)[] = {
    {kLowRank, sizeof(LowRankArgs), TM_NS::run, TM_NS::scratch},
    {},
};

}  // namespace mill
