// Where the keys and values of a row are, and how they are cut into pieces that any thread may take.
#pragma once

#include "attention.h"
#include "codes.h"
#include "elementwise.h"
#include "vec.h"

namespace mill {
namespace TM_NS {

inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How the keys of a single are cut: it depends on nothing but their number, so that neither the number of threads nor
// the other rows have any influence on the result.
struct Cut {
    int64_t low;     // first key inside the window
    int64_t length;  // keys per piece, whole tiles
    int64_t count;

    Cut(const AttentionArgs& a, int64_t context) {
        low = a.window ? at_least(0, context - a.window) : 0;
        const int64_t keys = context - low;
        length = pieces(pieces(keys, kMaxSplits), kTile) * kTile;
        count = at_least(1, pieces(keys, at_least(1, length)));
    }
};

// What one piece of the keys gives for one head: the largest score, the sum of the weights, the weighted values.
inline int64_t partial_floats(const AttentionArgs& a) { return 2 + a.v_dim; }

// Start to bring a key or value closer: they come from all over the memory, where no hardware guesses the next one.
template <class T>
void fetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

// Keys and values of a row and kv head, stored as T.
template <class T>
struct Keys {
    const AttentionArgs& a;
    int64_t head;
    const int32_t* table;  // blocks of the row

    Keys(const AttentionArgs& a, int64_t row, int64_t head)
        : a(a), head(head), table(a.tables + a.rows[row] * a.table_row) {}

    // Pointers to the keys and values at positions [from, to), at most a tile. The last one again up to a multiple of 4.
    void find(int64_t from, int64_t to, const T** keys, const T** values) const {
        int64_t block = from / a.block_size, offset = from % a.block_size, j = 0;
        const int64_t n = to - from;
        while (j < n) {  // block by block, so that neighbours take an addition each
            const T* key = static_cast<const T*>(a.k) + table[block] * a.k_block + head * a.k_head + offset * a.k_slot;
            const T* value = static_cast<const T*>(a.v) + table[block] * a.v_block + head * a.v_head + offset * a.v_slot;
            const int64_t end = at_most(n, j + a.block_size - offset);
            for (int64_t i = 0; i < end - j; i++) {
                keys[j + i] = key + i * a.k_slot;
                values[j + i] = value + i * a.v_slot;
            }
            j = end;
            offset = 0;
            block++;
        }
        for (; j % 4; j++) {
            keys[j] = keys[n - 1];
            values[j] = values[n - 1];
        }
    }

    // The scales of the same keys and values; zeros up to a whole vector.
    void find_scales(int64_t from, int64_t to, float* keys, float* values) const {
        int64_t block = from / a.block_size, offset = from % a.block_size, j = 0;
        const int64_t n = to - from;
        while (j < n) {
            const Brain* key = static_cast<const Brain*>(a.k_scales) + table[block] * a.k_scale_block +
                               head * a.k_scale_head + offset * a.k_scale_slot;
            const Brain* value = static_cast<const Brain*>(a.v_scales) + table[block] * a.v_scale_block +
                                 head * a.v_scale_head + offset * a.v_scale_slot;
            const int64_t end = at_most(n, j + a.block_size - offset);
            for (int64_t i = 0; i < end - j; i++) {
                keys[j + i] = widen(key[i * a.k_scale_slot]);
                values[j + i] = widen(value[i * a.v_scale_slot]);
            }
            j = end;
            offset = 0;
            block++;
        }
        for (; j % W; j++) keys[j] = values[j] = 0;
    }
};

// x[i] *= scales[i], in whole vectors
inline void scale_each(float* x, const float* scales, int64_t n) {
    for (int64_t i = 0; i < n; i += W) store(x + i, load(x + i) * load(scales + i));
}

// Scores become softcap * tanh(scores / softcap).
inline void cap(float* scores, int64_t n, float softcap) {
    for (int64_t i = 0; i < n; i += W) store(scores + i, hyperbolic_tangent(load(scores + i) / softcap) * softcap);
}

}  // namespace TM_NS
}  // namespace mill
