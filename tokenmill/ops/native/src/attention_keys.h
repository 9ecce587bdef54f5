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

// Keys per piece, for a query that sees so many: whole tiles. Pieces begin at multiples of it, and each is attended for
// itself. So how a query's sums are taken depends on nothing but its position: neither on the number of threads, nor on
// other rows, nor on which queries of its row are computed with it.
inline int64_t piece_length(int64_t keys) {
    int64_t length = kPiece;
    while (length * kMaxPieces < keys) length *= 2;
    return length;
}

// How many keys a query sees that stands behind so many, itself included.
inline int64_t keys_seen(const AttentionArgs& a, int64_t context) { return a.window ? at_most(a.window, context) : context; }

// The pieces of a single's keys.
struct Cut {
    int64_t low;     // first key inside the window
    int64_t begin;   // of the first piece
    int64_t length;  // keys per piece
    int64_t count;

    Cut(const AttentionArgs& a, int64_t context) {
        low = context - keys_seen(a, context);
        length = piece_length(context - low);
        begin = low / length * length;
        count = at_least(1, pieces(context - begin, length));
    }
};

// What some keys give for one head: the largest score, the sum of the weights, the weighted values in whole vectors.
inline int64_t whole_columns(const AttentionArgs& a) { return pieces(a.v_dim, W) * W; }
inline int64_t partial_floats(const AttentionArgs& a) { return 2 + whole_columns(a); }

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

    // Pointers to the keys and values at positions [from, to), at most a tile. The last one again up to a multiple of W.
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
        for (; j % W; j++) {
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

// a * b + c * d. Not inlined: where a compiler fuses one product with the sum, it might take the other one elsewhere, and
// what is computed in two places would be rounded in two ways.
[[gnu::noinline]] static Vec two_products(Vec a, Vec b, Vec c, Vec d) { return a * b + c * d; }

// What some keys gave for W heads takes in what more of them gave. before and share: what the sums of both are multiplied with.
inline void merge_totals(Vec piece_top, Vec piece_total, Vec& top, Vec& total, Vec& before, Vec& share) {
    const Vec now = larger(piece_top, top), none = all(-__builtin_inff());
    const Vec base = now == none ? Vec{} : now;
    before = exponential(top - base);
    share = exponential(piece_top - base);
    total = two_products(total, before, piece_total, share);
    top = now;
}

// sums = sums * before + piece * share, in whole vectors. Not inlined, as above.
[[gnu::noinline]] static void merge_sums(const float* piece, float share, float before, float* sums, int64_t columns) {
    for (int64_t d = 0; d < columns; d += W) store(sums + d, load(sums + d) * before + load(piece + d) * share);
}

}  // namespace TM_NS
}  // namespace mill
