// Arguments of attention over the paged cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mill {

constexpr uint32_t kAttention = 80;

// Row i of the batch has the queries q_start[i] ... q_start[i + 1]; they stand at its last positions.
// The first `singles` rows have one query each, query i.
struct AttentionArgs {
    const float* q;  // [tokens, heads, k_dim]
    const void* k;   // [blocks, block_size, kv_heads, k_dim]
    const void* v;   // [blocks, block_size, kv_heads, v_dim]
    float* out;      // [tokens, heads, v_dim]
    const int32_t* rows;     // [n]: index into tables
    const int32_t* q_start;  // [n + 1]; not read where all rows are singles
    const int32_t* context;  // [n]: keys of the row
    const int32_t* tables;   // [table rows, max_blocks]
    const uint8_t* tree;     // [tokens, tree_stride]: which of its row's new tokens a query sees; or null
    const void* k_scales;    // [blocks, block_size, kv_heads] bfloat16: of codes
    const void* v_scales;
    const int64_t* counts;  // n and singles of this run, where they are no multiples of its rows; or null
    int64_t n, singles;     // may be negative: see rows_of in team.h. With counts, the most there are
    int64_t heads, kv_heads, k_dim, v_dim, block_size;
    int64_t q_token, q_head, out_token, out_head;  // strides, in elements
    int64_t k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, tree_stride;
    int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
    int64_t window;  // 0: none
    int64_t cache_storage;  // Storage in elementwise.h
    double softcap;         // 0: none
    double scale;
};

constexpr int64_t kTile = 64;        // keys that are looked at together
constexpr int64_t kPiece = 256;      // keys of a piece that is attended for itself, at least
constexpr int64_t kMaxPieces = 16;   // of what a query sees; with a window one more, since pieces begin where they do
constexpr int64_t kChunkRows = 192;  // queries times heads that share a tile of keys, at most

}  // namespace mill
