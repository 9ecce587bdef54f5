// Attention of one query per row: keys and values are read once, for all the heads that share them.
#pragma once

#include "attention_keys.h"

namespace mill {
namespace TM_NS {

constexpr int kHeads = 4;                      // heads that are computed together
constexpr int kScoreHeads = REGISTERS == 32 ? 4 : 2;   // heads times four keys: what the registers hold
constexpr int kColumns = REGISTERS == 32 ? 4 : 2;      // vectors of the result that are computed together

// scores[g, j] = q[g] . keys[j], summed as vec.h says; meanwhile the values are fetched.
// q: [G, dim in whole vectors], zeros behind dim. Behind the last key stands any other, up to a whole vector.
template <int G, class T>
void score(const float* q, int64_t dim, const T* const* keys, int64_t n, float* scores, const T* const* values,
           int64_t value_dim) {
    constexpr int together = 4 * kAcross;  // keys whose sums are taken at once
    const int64_t whole = dim / W * W, stride = pieces(dim, W) * W;
    for (int64_t j = 0; j < n; j += W) {
        Vec quads[G][W / together] = {};
        for (int part = 0; part < W / together && j + part * together < n; part++) {
            const T* const* key = keys + j + part * together;
            for (int i = 0; i < together; i++) fetch(values[j + part * together + i], value_dim);
            Vec sums[G][4] = {};  // of the keys i, i + 4, ... beside each other
            const auto add = [&](int i, const Vec rows[kAcross], int64_t d) {
                Vec x[kAcross];
                across(rows, x);
#pragma GCC unroll 4
                for (int c = 0; c < kAcross; c++)
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) sums[g][i] += x[c] * repeat(q + g * stride + d + c * kParts);
            };
            for (int64_t d = 0; d < whole; d += W)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    Vec rows[kAcross];
#pragma GCC unroll 4
                    for (int k = 0; k < kAcross; k++) rows[k] = load_wide(key[i + 4 * k] + d);
                    add(i, rows, d);
                }
            if (whole < dim) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    Vec rows[kAcross];
                    for (int k = 0; k < kAcross; k++) {
                        float rest[W] = {};
                        for (int64_t d = whole; d < dim; d++) rest[d - whole] = widen(key[i + 4 * k][d]);
                        rows[k] = load(rest);
                    }
                    add(i, rows, whole);
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) quads[g][part] = sum_quad(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) store(scores + g * kTile + j, join_parts(quads[g]));
    }
}

// sums[g] = sums[g] * factor[g] + weights[g] . values, for C * W of the columns; meanwhile the next keys are fetched
template <int G, int C, class T>
void weigh_columns(const float* weights, const T* const* values, int64_t n, int64_t d, const float* factor, float* sums,
                   int64_t stride, const T* const* next, int64_t num_next, int64_t key_dim) {
    Vec total[G][C];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[g][c] = load(sums + g * stride + d + c * W) * factor[g];
    for (int64_t j = 0; j < n; j++) {
        if (j < num_next) fetch(next[j], key_dim);
        Vec x[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) x[c] = load_wide(values[j] + d + c * W);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            const Vec weight = all(weights[g * kTile + j]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) total[g][c] += x[c] * weight;
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(sums + g * stride + d + c * W, total[g][c]);
}

template <int G, class T>
void weigh(const float* weights, const T* const* values, int64_t n, int64_t dim, const float* factor, float* sums,
           int64_t stride, const T* const* next, int64_t num_next, int64_t key_dim) {
    int64_t d = 0;
    for (; d + kColumns * W <= dim; d += kColumns * W) {
        weigh_columns<G, kColumns>(weights, values, n, d, factor, sums, stride, next, num_next, key_dim);
        num_next = 0;
    }
    for (; d + W <= dim; d += W) {
        weigh_columns<G, 1>(weights, values, n, d, factor, sums, stride, next, num_next, key_dim);
        num_next = 0;
    }
    for (; d < dim; d++) {
        for (int g = 0; g < G; g++) {
            float total = sums[g * stride + d] * factor[g];
            for (int64_t j = 0; j < n; j++) total += widen(values[j][d]) * weights[g * kTile + j];
            sums[g * stride + d] = total;
        }
    }
}

// Scores become weights relative to a new maximum. Returns what earlier weights are to be multiplied with.
inline float soften(float* scores, int64_t n, float& top, float& total) {
    const int64_t padded = pieces(n, W) * W;
    for (int64_t j = n; j < padded; j++) scores[j] = -__builtin_inff();
    Vec best = all(top);
    for (int64_t j = 0; j < padded; j += W) best = larger(load(scores + j), best);
    const float now = max_lane(best);
    Vec sums = {};
    for (int64_t j = 0; j < padded; j += W) {
        const Vec weight = exponential(load(scores + j) - now);
        sums += weight;
        store(scores + j, weight);
    }
    const float factor = exponential(all(top - now))[0];
    top = now;
    total = total * factor + sum(sums);
    return factor;
}

// One piece of the keys of one single, for all heads of one kv head.
struct Piece {
    int64_t row, kv_head;
    int64_t from, to;  // keys of the piece, from the beginning of a tile on
    int64_t low;       // the first one that is seen

    Piece() : row(-1) {}  // no piece

    Piece(const AttentionArgs& a, int64_t row, int64_t kv_head, int64_t number) : row(row), kv_head(kv_head) {
        const int64_t context = a.context[row];
        const Cut cut(a, context);
        const int64_t begin = cut.begin + number * cut.length;
        low = at_least(cut.low, begin);
        from = low / kTile * kTile;
        to = at_most(context, begin + cut.length);
    }
};

// G heads of one kv head over a piece of the keys; meanwhile the first keys of `next` are fetched.
// partial: [G] of partial_floats.
template <int G, class T>
void attend_heads(const AttentionArgs& a, const Piece& piece, const float* q, const Piece& next, float* partial) {
    const int64_t stride = partial_floats(a), q_stride = pieces(a.k_dim, W) * W;
    const Keys<T> keys(a, piece.row, piece.kv_head);
    const T* key[2][kTile];  // of this tile and of the next one
    const T* value[2][kTile];
    float scores[G * kTile], factor[G], tops[G], totals[G];
    [[maybe_unused]] float key_scales[kTile], value_scales[kTile];  // of this tile
    for (int g = 0; g < G; g++) {
        tops[g] = -__builtin_inff();
        totals[g] = 0;
        for (int64_t d = 2; d < stride; d++) partial[g * stride + d] = 0;
    }
    int turn = 0;
    if (piece.from < piece.to) keys.find(piece.from, at_most(piece.from + kTile, piece.to), key[0], value[0]);
    for (int64_t at = piece.from; at < piece.to; at += kTile, turn ^= 1) {
        const int64_t n = at_most(kTile, piece.to - at);
        int64_t rest = at_most(kTile, piece.to - at - n);
        if (rest) {
            keys.find(at + n, at + n + rest, key[turn ^ 1], value[turn ^ 1]);
        } else if (next.row >= 0) {
            rest = at_most(kTile, next.to - next.from);
            Keys<T>(a, next.row, next.kv_head).find(next.from, next.from + rest, key[turn ^ 1], value[turn ^ 1]);
        }
        constexpr int first = G < kScoreHeads ? G : kScoreHeads;
        score<first>(q, a.k_dim, key[turn], n, scores, value[turn], a.v_dim);
        if constexpr (G > first)
            score<G - first>(q + first * q_stride, a.k_dim, key[turn], n, scores + first * kTile, value[turn], 0);
        if constexpr (scaled<T>) keys.find_scales(at, at + n, key_scales, value_scales);
        const int64_t hidden = at_least(0, piece.low - at);  // keys of the tile before the window: they may hold anything
        for (int g = 0; g < G; g++) {
            float* row = scores + g * kTile;
            if constexpr (scaled<T>) scale_each(row, key_scales, n);
            if (a.softcap != 0) cap(row, n, float(a.softcap));
            for (int64_t j = 0; j < hidden; j++) row[j] = -__builtin_inff();
            factor[g] = soften(row, n, tops[g], totals[g]);
            if constexpr (scaled<T>) scale_each(row, value_scales, n);
        }
        weigh<G>(scores + hidden, value[turn] + hidden, n - hidden, a.v_dim, factor, partial + 2, stride, key[turn ^ 1], rest,
                 a.k_dim);
        for (int64_t j = n - hidden; j < rest; j++) fetch(key[turn ^ 1][j], a.k_dim);
    }
    for (int g = 0; g < G; g++) {
        partial[g * stride] = tops[g];
        partial[g * stride + 1] = totals[g];
    }
}

inline int64_t piece_floats(const AttentionArgs& a) { return kHeads * pieces(a.k_dim, W) * W; }

// memory: piece_floats. partial: [group] of partial_floats. `next` is what this thread computes afterwards.
template <class T>
void attend_piece(const AttentionArgs& a, const Piece& piece, const Piece& next, float* memory, float* partial) {
    const int64_t group = a.heads / a.kv_heads, stride = pieces(a.k_dim, W) * W;
    for (int64_t first = 0; first < group; first += kHeads) {
        const int64_t n = at_most(kHeads, group - first);
        for (int64_t g = 0; g < n; g++) {
            const float* q = a.q + piece.row * a.q_token + (piece.kv_head * group + first + g) * a.q_head;
            for (int64_t d = 0; d < a.k_dim; d++) memory[g * stride + d] = q[d] * float(a.scale);
            for (int64_t d = a.k_dim; d < stride; d++) memory[g * stride + d] = 0;
        }
        const Piece& after = first + kHeads < group ? piece : next;
        float* to = partial + first * partial_floats(a);
        if (n == 1) attend_heads<1, T>(a, piece, memory, after, to);
        if (n == 2) attend_heads<2, T>(a, piece, memory, after, to);
        if (n == 3) attend_heads<3, T>(a, piece, memory, after, to);
        if (n == 4) attend_heads<4, T>(a, piece, memory, after, to);
    }
}

// The pieces of one head of one single become its result. partials: [count] with a stride between pieces; the first one is
// written over.
inline void join(const AttentionArgs& a, int64_t row, int64_t head, float* partials, int64_t count, int64_t stride) {
    Vec top = all(partials[0]), total = all(partials[1]), before, share;
    float* sums = partials + 2;
    for (int64_t i = 1; i < count; i++) {
        const float* piece = partials + i * stride;
        merge_totals(all(piece[0]), all(piece[1]), top, total, before, share);
        merge_sums(piece + 2, share[0], before[0], sums, whole_columns(a));
    }
    float* out = a.out + row * a.out_token + head * a.out_head;
    const float whole = 1 / total[0];
    for (int64_t d = 0; d < a.v_dim; d++) out[d] = sums[d] * whole;
}

}  // namespace TM_NS
}  // namespace mill
