// Attention of one query per row: keys and values are read once, for all the heads that share them.
#pragma once

#include "attention_keys.h"

namespace mill {
namespace TM_NS {

constexpr int kHeads = 4;                      // heads that are computed together
constexpr int kKeys = W == 16 ? 4 : 2;         // keys that are computed together: what the registers hold
constexpr int kColumns = W == 16 ? 4 : 2;      // vectors of the result that are computed together

// scores[g, j] = q[g] . keys[j]; meanwhile the values are fetched
template <int G>
void score(const float* q, int64_t dim, const float* const* keys, int64_t n, float* scores, const float* const* values,
           int64_t value_dim) {
    const int64_t whole = dim / W * W;
    for (int64_t j = 0; j < n; j += kKeys) {
        const float* key[kKeys];
        for (int i = 0; i < kKeys; i++) key[i] = keys[at_most(j + i, n - 1)];  // the last one again where there are no more
        for (int64_t i = j; i < at_most(j + kKeys, n); i++) {
            if (i + kAhead < n) fetch(keys[i + kAhead], dim);
            fetch(values[i], value_dim);
        }
        Vec sums[(G * kKeys + 3) / 4 * 4] = {};
        for (int64_t d = 0; d < whole; d += W) {
            Vec x[kKeys];
#pragma GCC unroll 4
            for (int i = 0; i < kKeys; i++) x[i] = load(key[i] + d);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                const Vec y = load(q + g * dim + d);
#pragma GCC unroll 4
                for (int i = 0; i < kKeys; i++) sums[g * kKeys + i] += x[i] * y;
            }
        }
        float found[(G * kKeys + 3) / 4 * 4];
        for (int s = 0; s < G * kKeys; s += 4) sum4(sums[s], sums[s + 1], sums[s + 2], sums[s + 3], found + s);
        for (int g = 0; g < G; g++) {
            for (int i = 0; i < kKeys && j + i < n; i++) {
                float total = found[g * kKeys + i];
                for (int64_t d = whole; d < dim; d++) total += q[g * dim + d] * key[i][d];
                scores[g * kTile + j + i] = total;
            }
        }
    }
}

// sums[g] = sums[g] * factor[g] + weights[g] . values, for C * W of the columns; meanwhile the next keys are fetched
template <int G, int C>
void weigh_columns(const float* weights, const float* const* values, int64_t n, int64_t d, const float* factor, float* sums,
                   int64_t stride, const float* const* next, int64_t num_next, int64_t key_dim) {
    Vec total[G][C];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[g][c] = load(sums + g * stride + d + c * W) * factor[g];
    for (int64_t j = 0; j < n; j++) {
        if (j < num_next) fetch(next[j], key_dim);
        Vec x[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) x[c] = load(values[j] + d + c * W);
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

template <int G>
void weigh(const float* weights, const float* const* values, int64_t n, int64_t dim, const float* factor, float* sums,
           int64_t stride, const float* const* next, int64_t num_next, int64_t key_dim) {
    int64_t d = 0;
    for (; d + kColumns * W <= dim; d += kColumns * W) {
        weigh_columns<G, kColumns>(weights, values, n, d, factor, sums, stride, next, num_next, key_dim);
        num_next = 0;
    }
    for (; d + W <= dim; d += W) weigh_columns<G, 1>(weights, values, n, d, factor, sums, stride, next, 0, key_dim);
    for (; d < dim; d++) {
        for (int g = 0; g < G; g++) {
            float total = sums[g * stride + d] * factor[g];
            for (int64_t j = 0; j < n; j++) total += values[j][d] * weights[g * kTile + j];
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

// G heads of one kv head over the keys [from, to) of a row. partial: [G] of partial_floats.
template <int G>
void attend_range(const AttentionArgs& a, const Keys& keys, const float* q, int64_t from, int64_t to, float* partial) {
    const int64_t stride = partial_floats(a);
    const float* key[2][kTile];  // of this tile and of the next one
    const float* value[2][kTile];
    float scores[G * kTile], factor[G];
    // Converted tiles share their memory: then the next one is found only when this one is done.
    const bool ahead = a.cache_storage == kFloat;
    int turn = 0;
    if (ahead && from < to) keys.find(from, at_most(from + kTile, to), key[0], value[0]);
    for (int64_t at = from; at < to; at += kTile, turn ^= 1) {
        const int64_t n = at_most(kTile, to - at), rest = at_most(kTile, to - at - n);
        if (!ahead) keys.find(at, at + n, key[turn], value[turn]);
        if (ahead && rest) keys.find(at + n, at + n + rest, key[turn ^ 1], value[turn ^ 1]);
        score<G>(q, a.k_dim, key[turn], n, scores, value[turn], ahead ? a.v_dim : 0);
        for (int g = 0; g < G; g++) {
            if (a.softcap != 0) cap(scores + g * kTile, n, float(a.softcap));
            factor[g] = soften(scores + g * kTile, n, partial[g * stride], partial[g * stride + 1]);
        }
        weigh<G>(scores, value[turn], n, a.v_dim, factor, partial + 2, stride, key[turn ^ 1], ahead ? rest : 0, a.k_dim);
    }
}

template <int G>
void attend_heads(const AttentionArgs& a, const Keys& keys, const float* q, int64_t sinks, int64_t from, int64_t to,
                  float* partial) {
    const int64_t stride = partial_floats(a);
    for (int g = 0; g < G; g++) {
        partial[g * stride] = -__builtin_inff();
        for (int64_t d = 1; d < stride; d++) partial[g * stride + d] = 0;
    }
    if (sinks) attend_range<G>(a, keys, q, 0, sinks, partial);
    attend_range<G>(a, keys, q, from, to, partial);
}

inline int64_t piece_floats(const AttentionArgs& a) { return Keys::memory_floats(a) + kHeads * a.k_dim; }

// One piece of the keys of one single, for all heads of one kv head. memory: piece_floats. partial: [group] of
// partial_floats.
inline void attend_piece(const AttentionArgs& a, int64_t row, int64_t kv_head, int64_t piece, float* memory,
                         float* partial) {
    const int64_t context = a.context[row], group = a.heads / a.kv_heads;
    const Cut cut(a, context);
    const int64_t from = cut.low + piece * cut.length, to = at_most(context, from + cut.length);
    const int64_t sinks = piece == 0 ? at_most(a.sinks, cut.low) : 0;
    const Keys keys(a, row, kv_head, memory);
    float* q = memory + Keys::memory_floats(a);
    for (int64_t first = 0; first < group; first += kHeads) {
        const int64_t n = at_most(kHeads, group - first);
        for (int64_t g = 0; g < n; g++) {
            const float* from_q = a.q + row * a.q_token + (kv_head * group + first + g) * a.q_head;
            for (int64_t d = 0; d < a.k_dim; d++) q[g * a.k_dim + d] = from_q[d] * float(a.scale);
        }
        float* to_partial = partial + first * partial_floats(a);
        if (n == 1) attend_heads<1>(a, keys, q, sinks, from, to, to_partial);
        if (n == 2) attend_heads<2>(a, keys, q, sinks, from, to, to_partial);
        if (n == 3) attend_heads<3>(a, keys, q, sinks, from, to, to_partial);
        if (n == 4) attend_heads<4>(a, keys, q, sinks, from, to, to_partial);
    }
}

// The pieces of one head of one single become its result. partials: [count] with a stride between pieces.
inline void join(const AttentionArgs& a, int64_t row, int64_t head, const float* partials, int64_t count, int64_t stride) {
    float* out = a.out + row * a.out_token + head * a.out_head;
    float top = -__builtin_inff(), total = 0;
    for (int64_t i = 0; i < count; i++) top = partials[i * stride] > top ? partials[i * stride] : top;
    float share[kMaxSplits];
    for (int64_t i = 0; i < count; i++) {
        share[i] = exponential(all(partials[i * stride] - top))[0];
        total += share[i] * partials[i * stride + 1];
    }
    for (int64_t i = 0; i < count; i++) share[i] = share[i] / total;
    int64_t d = 0;
    for (; d + W <= a.v_dim; d += W) {
        Vec mixed = {};
        for (int64_t i = 0; i < count; i++) mixed += load(partials + i * stride + 2 + d) * share[i];
        store(out + d, mixed);
    }
    for (; d < a.v_dim; d++) {
        float mixed = 0;
        for (int64_t i = 0; i < count; i++) mixed += partials[i * stride + 2 + d] * share[i];
        out[d] = mixed;
    }
}

}  // namespace TM_NS
}  // namespace mill
