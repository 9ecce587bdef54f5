// Attention of several queries of a row: tiles of keys are packed once for all the queries and heads that see them.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_keys.h"

namespace mill {
namespace TM_NS {

constexpr int kBlockRows = W == 4 ? 4 : 6;      // rows and vectors of a product that stay in registers; rows: at most W
constexpr int kBlockColumns = REGISTERS == 32 ? 4 : 2;

// What a product does with the values that stand in its place: it writes over them, goes on with their sums, or writes
// scores over them, which are summed in parts (vec.h), as those of singles are.
enum class Into { kNew, kSums, kScores };

// c[R, C * W] = a[R, depth] b[depth, C * W], as `into` says
template <int R, int C, Into into>
void multiply_block(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
    constexpr int parts = into == Into::kScores ? kParts : 1;
    [[maybe_unused]] Vec waiting[3][R][C];  // sums of 1, 2 and 4 parts
    for (int part = 0; part < parts; part++) {
        Vec sums[R][C] = {};
        if constexpr (into == Into::kSums) {
#pragma GCC unroll 6
            for (int i = 0; i < R; i++)
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) sums[i][j] = load(c + i * ldc + j * W);
        }
        for (int64_t k = parts == 1 ? 0 : kPartOrder[part]; k < depth; k += parts) {
            Vec x[C];
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) x[j] = load(b + k * ldb + j * W);
#pragma GCC unroll 6
            for (int i = 0; i < R; i++) {
                const Vec y = all(a[i * lda + k]);
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) sums[i][j] += x[j] * y;
            }
        }
        int level = 0;
        for (int pairs = part; pairs % 2; pairs /= 2, level++)
#pragma GCC unroll 6
            for (int i = 0; i < R; i++)
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) sums[i][j] += waiting[level][i][j];
#pragma GCC unroll 6
        for (int i = 0; i < R; i++)
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) {
                if (part == parts - 1)
                    store(c + i * ldc + j * W, sums[i][j]);
                else
                    waiting[level][i][j] = sums[i][j];
            }
    }
}

// As multiply_block for any number of vectors, at most kBlockColumns.
template <int R, Into into>
void multiply_columns(int64_t vectors, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                      int64_t ldc) {
    if (vectors == 1) return multiply_block<R, 1, into>(depth, a, lda, b, ldb, c, ldc);
    if (vectors == 2) return multiply_block<R, 2, into>(depth, a, lda, b, ldb, c, ldc);
    if constexpr (kBlockColumns > 2) {
        if (vectors == 3) return multiply_block<R, 3, into>(depth, a, lda, b, ldb, c, ldc);
        if (vectors == 4) return multiply_block<R, 4, into>(depth, a, lda, b, ldb, c, ldc);
    }
}

// As multiply_block for at most kBlockRows rows, columns in whole vectors
template <Into into>
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc) {
    for (int64_t j = 0; j < columns; j += kBlockColumns * W) {
        const int64_t vectors = at_most(kBlockColumns, (columns - j) / W);
        int64_t i = 0;
        if (rows == kBlockRows) multiply_columns<kBlockRows, into>(vectors, depth, a, lda, b + j, ldb, c + j, ldc), i = rows;
        for (; i + 2 <= rows; i += 2)
            multiply_columns<2, into>(vectors, depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
        if (i < rows) multiply_columns<1, into>(vectors, depth, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc);
    }
}

// A tile of keys is packed with its columns as rows, so that the lanes of a vector are neighbouring keys. Codes stay codes.
template <class T>
void pack_keys(const T* const* keys, int64_t n, int64_t dim, float* packed) {  // packed: [dim, kTile]
    int64_t j = 0;
#if defined(TM_FOUR)
    for (; j + 4 <= n; j += 4) {
        int64_t d = 0;
        for (; d + 4 <= dim; d += 4) {
            Four r[4];
            for (int i = 0; i < 4; i++) r[i] = load4(keys[j + i] + d);
            TM_TRANSPOSE4(r[0], r[1], r[2], r[3]);
            for (int i = 0; i < 4; i++) store4(packed + (d + i) * kTile + j, r[i]);
        }
        for (; d < dim; d++)
            for (int i = 0; i < 4; i++) packed[d * kTile + j + i] = widen(keys[j + i][d]);
    }
#endif
    for (; j < n; j++)
        for (int64_t d = 0; d < dim; d++) packed[d * kTile + j] = widen(keys[j][d]);
    for (; j < kTile; j++)
        for (int64_t d = 0; d < dim; d++) packed[d * kTile + j] = 0;
}

template <class T>
void pack_values(const T* const* values, int64_t n, int64_t dim, int64_t stride, float* packed) {  // packed: [kTile, stride]
    for (int64_t j = 0; j < kTile; j++) {
        float* to = packed + j * stride;
        int64_t d = 0;
        if (j < n) {
            for (; d + W <= dim; d += W) store(to + d, load_wide(values[j] + d));
            for (; d < dim; d++) to[d] = widen(values[j][d]);
        }
        for (; d < stride; d++) to[d] = 0;
    }
}

// Some queries of a row and some heads of one kv head: `size` pairs, heads of a query beside each other.
struct ChunkTile {
    int64_t row, kv_head, first_head, heads, first_query, queries;

    int64_t size() const { return heads * queries; }
};

// What keys give for each of a tile's pairs: the largest score, the sum of the weights, the weighted values.
struct Sums {
    float *tops, *totals, *values;  // values: [pairs, columns]

    static int64_t floats(int64_t columns) { return kChunkRows * (columns + 2); }

    explicit Sums(float* memory) : tops(memory), totals(tops + kChunkRows), values(totals + kChunkRows) {}

    void clear() {  // values are written before they are added to
        for (int64_t m = 0; m < kChunkRows; m++) tops[m] = -__builtin_inff(), totals[m] = 0;
    }
};

// The memory of a thread that computes a tile, and how much of it there is.
struct ChunkScratch {
    int64_t columns;  // v_dim in whole vectors
    float *q, *keys, *values, *scores;
    Sums piece, all;  // of a piece of the keys, and of those before it

    static int64_t floats(const AttentionArgs& a) {
        const int64_t columns = whole_columns(a);
        return kChunkRows * (a.k_dim + kTile) + kTile * (a.k_dim + columns) + 2 * Sums::floats(columns) + 64;
    }

    ChunkScratch(const AttentionArgs& a, float* memory)
        : columns(whole_columns(a)),
          q(memory),
          keys(q + kChunkRows * a.k_dim),
          values(keys + a.k_dim * kTile),
          scores(values + kTile * columns),
          piece(scores + kChunkRows * kTile),
          all(piece.values + kChunkRows * columns) {}
};

// Which keys the queries of a tile see.
struct Sight {
    int64_t first_position;  // of the tile's first query
    int64_t last_position;
    int64_t fresh;  // position of the row's first query: the tree speaks of keys from here on
    int64_t low;    // no query of the tile sees keys before this
    int64_t end;    // nor keys from here on
    const uint8_t* tree;  // of the tile's first query, or null

    Sight(const AttentionArgs& a, const ChunkTile& t) {
        const int64_t begin = a.q_start[t.row], count = a.q_start[t.row + 1] - begin, context = a.context[t.row];
        fresh = context - count;
        first_position = fresh + t.first_query;
        last_position = first_position + t.queries - 1;
        low = a.window ? at_least(0, first_position - a.window + 1) : 0;
        end = a.tree ? context : last_position + 1;
        tree = a.tree ? a.tree + (begin + t.first_query) * a.tree_stride : nullptr;
    }

    // How many keys of a tile that begins at `base` and has n keys stand before the end of what a query sees.
    int64_t reach(int64_t query, int64_t base, int64_t n) const {
        return tree ? n : at_least(0, at_most(n, first_position + query + 1 - base));
    }

    // Take the scores of keys that a query does not see out of a tile that begins at `base` and has n keys.
    void hide(const AttentionArgs& a, int64_t query, int64_t base, int64_t n, float* scores) const {
        const int64_t position = first_position + query;
        for (int64_t j = reach(query, base, n); j < kTile; j++) scores[j] = -__builtin_inff();
        if (a.window) {
            const int64_t low = at_most(kTile, position - a.window + 1 - base);
            for (int64_t j = 0; j < low; j++) scores[j] = -__builtin_inff();
        }
        if (tree) {
            for (int64_t j = at_least(0, fresh - base); j < n; j++)
                if (!tree[query * a.tree_stride + base + j - fresh]) scores[j] = -__builtin_inff();
        }
    }

    // Whether every query sees all keys in [from, to).
    bool complete(const AttentionArgs& a, int64_t from, int64_t to) const {
        if (to > (tree ? fresh : first_position + 1)) return false;
        return !a.window || from > last_position - a.window;
    }
};

// As `soften` of singles, for a few rows of n scores each, which may all be hidden; n in whole vectors. The rows are taken
// through each step together, since a row alone would wait for the maximum, the factor and the sum in turn.
inline void soften_rows(float* scores, int64_t rows, int64_t n, float* tops, float* totals, float* factors) {
    float bases[W] = {}, before[W] = {};
    for (int64_t i = 0; i < rows; i++) {
        Vec best = all(tops[i]);
        for (int64_t j = 0; j < n; j += W) best = larger(load(scores + i * kTile + j), best);
        const float now = max_lane(best);
        bases[i] = now == -__builtin_inff() ? 0 : now;  // nothing seen so far: all weights are e^-inf, not NaN
        before[i] = tops[i];
        tops[i] = now;
    }
    store(factors, exponential(load(before) - load(bases)));
    for (int64_t i = 0; i < rows; i++) {
        Vec sums = {};
        for (int64_t j = 0; j < n; j += W) {
            const Vec weight = exponential(load(scores + i * kTile + j) - bases[i]);
            sums += weight;
            store(scores + i * kTile + j, weight);
        }
        totals[i] = totals[i] * factors[i] + sum(sums);
    }
}

inline void take_queries(const AttentionArgs& a, const ChunkTile& t, ChunkScratch& s) {
    const int64_t begin = a.q_start[t.row] + t.first_query, group = a.heads / a.kv_heads;
    for (int64_t m = 0; m < t.size(); m++) {
        const int64_t head = t.kv_head * group + t.first_head + m % t.heads;
        const float* q = a.q + (begin + m / t.heads) * a.q_token + head * a.q_head;
        for (int64_t d = 0; d < a.k_dim; d++) s.q[m * a.k_dim + d] = q[d] * float(a.scale);
    }
}

inline void give_results(const AttentionArgs& a, const ChunkTile& t, const ChunkScratch& s) {
    const int64_t begin = a.q_start[t.row] + t.first_query, group = a.heads / a.kv_heads;
    for (int64_t m = 0; m < t.size(); m++) {
        const int64_t head = t.kv_head * group + t.first_head + m % t.heads;
        float* out = a.out + (begin + m / t.heads) * a.out_token + head * a.out_head;
        const float whole = 1 / s.all.totals[m];
        for (int64_t d = 0; d < a.v_dim; d++) out[d] = s.all.values[m * s.columns + d] * whole;
    }
}

// A tile of keys that begins at `base`, a multiple of kTile: so a query meets its keys in the same groups whatever else is
// computed with it. Keys that no query of a few rows reaches are left out of their products: their weights would be zeros.
// fresh: the first tile of a piece.
template <class T>
void attend_tile(const AttentionArgs& a, const ChunkTile& t, const Sight& sight, const Keys<T>& keys, int64_t base, bool fresh,
                 ChunkScratch& s) {
    const T* key[kTile];
    const T* value[kTile];
    const int64_t to = at_most(base + kTile, sight.end), n = to - base;
    [[maybe_unused]] float key_scales[kTile], value_scales[kTile];
    keys.find(base, to, key, value);
    pack_keys(key, n, a.k_dim, s.keys);
    pack_values(value, n, a.v_dim, s.columns, s.values);
    const int64_t unseen = at_most(n, sight.low - base);  // nobody sees these: they may hold anything
    for (int64_t j = 0; j < unseen; j++)
        for (int64_t d = 0; d < s.columns; d++) s.values[j * s.columns + d] = 0;
    if constexpr (scaled<T>) {
        keys.find_scales(base, to, key_scales, value_scales);
        for (int64_t j = 0; j < unseen; j++) value_scales[j] = 0;
    }
    const bool complete = n == kTile && sight.complete(a, base, to);
    const auto each_block = [&](auto use) {  // use(first row, rows, keys that they reach in whole vectors)
        for (int64_t m = 0; m < t.size(); m += kBlockRows) {
            const int64_t rows = at_most(kBlockRows, t.size() - m);
            const int64_t reach = pieces(sight.reach((m + rows - 1) / t.heads, base, n), W) * W;
            if (reach) use(m, rows, reach);
        }
    };
    each_block([&](int64_t m, int64_t rows, int64_t reach) {
        multiply<Into::kScores>(rows, reach, a.k_dim, s.q + m * a.k_dim, a.k_dim, s.keys, kTile, s.scores + m * kTile, kTile);
    });
    each_block([&](int64_t first, int64_t rows, int64_t reach) {
        for (int64_t m = first; m < first + rows; m++) {
            if constexpr (scaled<T>) scale_each(s.scores + m * kTile, key_scales, reach);
            if (a.softcap != 0) cap(s.scores + m * kTile, reach, float(a.softcap));
            if (!complete) sight.hide(a, m / t.heads, base, n, s.scores + m * kTile);
        }
        float factors[W];
        soften_rows(s.scores + first * kTile, rows, reach, s.piece.tops + first, s.piece.totals + first, factors);
        if constexpr (scaled<T>)
            for (int64_t m = first; m < first + rows; m++) scale_each(s.scores + m * kTile, value_scales, reach);
        for (int64_t i = 0; i < rows && !fresh; i++) {
            if (factors[i] == 1) continue;
            float* sums = s.piece.values + (first + i) * s.columns;
            for (int64_t d = 0; d < s.columns; d += W) store(sums + d, load(sums + d) * factors[i]);
        }
    });
    const auto weigh_rows = [&](auto into, int64_t m, int64_t rows, int64_t reach) {
        multiply<into.value>(rows, s.columns, reach, s.scores + m * kTile, kTile, s.values, s.columns,
                             s.piece.values + m * s.columns, s.columns);
    };
    each_block([&](int64_t m, int64_t rows, int64_t reach) {
        if (fresh) return weigh_rows(std::integral_constant<Into, Into::kNew>(), m, rows, reach);
        weigh_rows(std::integral_constant<Into, Into::kSums>(), m, rows, reach);
    });
}

// The end of a piece: what all of its tiles gave is added to what was before.
inline void take_in(const ChunkTile& t, ChunkScratch& s, bool first) {
    if (first) return std::swap(s.piece, s.all);
    for (int64_t m = 0; m < t.size(); m += W) {
        const float *tops = s.piece.tops + m, *totals = s.piece.totals + m;
        Vec top = load(s.all.tops + m), total = load(s.all.totals + m), before, share;
        merge_totals(load(tops), load(totals), top, total, before, share);
        store(s.all.tops + m, top);
        store(s.all.totals + m, total);
        for (int64_t i = 0; i < at_most(W, t.size() - m); i++) {
            if (tops[i] == -__builtin_inff() && totals[i] == 0) continue;  // the row sees none of its keys
            const int64_t at = (m + i) * s.columns;
            merge_sums(s.piece.values + at, share[i], before[i], s.all.values + at, s.columns);
        }
    }
}

// Queries whose keys are cut into pieces of one length.
template <class T>
void attend_queries(const AttentionArgs& a, const ChunkTile& t, int64_t length, float* memory) {
    ChunkScratch s(a, memory);
    const Sight sight(a, t);
    const Keys<T> keys(a, t.row, t.kv_head);
    take_queries(a, t, s);
    bool fresh = true, first = true;
    for (int64_t base = sight.low / kTile * kTile; base < sight.end; base += kTile) {
        if (fresh) s.piece.clear();
        attend_tile(a, t, sight, keys, base, fresh, s);
        fresh = (base + kTile) % length == 0;
        if (!fresh && base + kTile < sight.end) continue;
        take_in(t, s, first);
        first = false;
    }
    give_results(a, t, s);
}

template <class T>
void attend_chunk(const AttentionArgs& a, const ChunkTile& t, float* memory) {
    const int64_t context = a.context[t.row], count = a.q_start[t.row + 1] - a.q_start[t.row];
    if (a.tree) return attend_queries<T>(a, t, piece_length(context), memory);  // nobody counts what a node sees
    for (int64_t done = 0; done < t.queries;) {
        const int64_t seen = context - count + t.first_query + done + 1;  // keys up to the first query
        const int64_t length = piece_length(keys_seen(a, seen)), most = length * kMaxPieces;
        ChunkTile part = t;
        part.first_query += done;
        part.queries = t.queries - done;
        if (!a.window || a.window > most) part.queries = at_most(part.queries, most - seen + 1);
        attend_queries<T>(a, part, length, memory);
        done += part.queries;
    }
}

}  // namespace TM_NS
}  // namespace mill
