// Where the keys and values of a row are, and how they are cut into pieces that any thread may take.
#pragma once

#include "attention.h"
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

constexpr int64_t kAhead = 16;  // keys between the one that is computed and the one that is fetched

// Start to bring a key or value closer: they come from all over the memory, where no hardware guesses the next one.
template <class T>
void fetch(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

// Keys and values of a row and kv head as floats: in place where the cache holds floats, else converted a tile at a time.
struct Keys {
    const AttentionArgs& a;
    int64_t head;
    const int32_t* table;  // blocks of the row
    float* memory;         // room for a tile of converted keys and values: see memory_floats

    Keys(const AttentionArgs& a, int64_t row, int64_t head, float* memory)
        : a(a), head(head), table(a.tables + a.rows[row] * a.table_row), memory(memory) {}

    static int64_t memory_floats(const AttentionArgs& a) { return a.cache_storage ? kTile * (a.k_dim + a.v_dim) : 0; }

    // Pointers to the keys and values at positions [from, to), at most a tile; valid until the next call.
    void find(int64_t from, int64_t to, const float** keys, const float** values) const {
        if (a.cache_storage == kFloat) {
            walk(from, to, [&](int64_t j, int64_t k, int64_t v) {
                keys[j] = static_cast<const float*>(a.k) + k;
                values[j] = static_cast<const float*>(a.v) + v;
            });
        }
        if (a.cache_storage == kHalf) convert<Half>(from, to, keys, values);
        if (a.cache_storage == kBrain) convert<Brain>(from, to, keys, values);
    }

  private:
    // Calls use(j, k, v) for each position with the offsets of its key and value in the caches.
    template <class Use>
    void walk(int64_t from, int64_t to, Use use) const {
        int64_t block = from / a.block_size, offset = from % a.block_size;
        for (int64_t j = 0; j < to - from; j++) {
            use(j, table[block] * a.k_block + offset * a.k_slot + head * a.k_head,
                table[block] * a.v_block + offset * a.v_slot + head * a.v_head);
            if (++offset == a.block_size) {
                offset = 0;
                block++;
            }
        }
    }

    template <class T>
    static void widen_row(const T* from, int64_t dim, float* to) {
        int64_t d = 0;
        for (; d + W <= dim; d += W) store(to + d, load_wide(from + d));
        for (; d < dim; d++) to[d] = widen(from[d]);
    }

    template <class T>
    void convert(int64_t from, int64_t to, const float** keys, const float** values) const {
        const T* key[kTile];
        const T* value[kTile];
        walk(from, to, [&](int64_t j, int64_t k, int64_t v) {
            key[j] = static_cast<const T*>(a.k) + k;
            value[j] = static_cast<const T*>(a.v) + v;
            keys[j] = memory + j * a.k_dim;
            values[j] = memory + kTile * a.k_dim + j * a.v_dim;
        });
        for (int64_t j = 0; j < to - from; j++) {
            const int64_t next = at_most(j + kAhead, to - from - 1);
            fetch(key[next], a.k_dim);
            fetch(value[next], a.v_dim);
            widen_row(key[j], a.k_dim, memory + j * a.k_dim);
            widen_row(value[j], a.v_dim, memory + kTile * a.k_dim + j * a.v_dim);
        }
    }
};

// Scores become softcap * tanh(scores / softcap).
inline void cap(float* scores, int64_t n, float softcap) {
    for (int64_t i = 0; i < n; i += W) store(scores + i, hyperbolic_tangent(load(scores + i) / softcap) * softcap);
}

}  // namespace TM_NS
}  // namespace mill
