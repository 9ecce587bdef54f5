// Arguments of the ops around the products: norms, rotation and the write to the cache, activations, lookup, choice.
#pragma once

#include <cstdint>

namespace mill {

// How the elements of a tensor are stored.
enum Storage : int64_t { kFloat = 0, kHalf = 1, kBrain = 2, kCodes = 3 };  // codes: eight bits, with scales beside

enum ElementwiseKind : uint32_t {
    kNorm = 64,
    kRope = 65,
    kActMul = 66,
    kEmbed = 67,
    kAdd = 68,
    kDecodeInputs = 69,
    kChoose = 70,
    kMap = 71,
    kPick = 72,
};

// Counts of rows may be negative: see rows_of in team.h.

// out = norm(x), or with a residual: total = x + residual, out = norm(total). total may be residual, out may be x.
struct NormArgs {
    const float* x;         // [rows, dim]
    const float* residual;  // [rows, dim], or null
    const void* weight;     // [dim]
    float* total;           // [rows, dim], with a residual
    float* out;             // [rows, dim]
    int64_t rows, dim;
    int64_t x_stride, residual_stride, total_stride, out_stride;  // elements from row to row
    int64_t weight_storage;
    double eps;
};

// Norm the heads (with q_norm), rotate them, and write keys and values to their slots. Without kv_heads: queries only.
struct RopeArgs {
    float* q;            // [tokens, heads, dim], rotated in place
    const float* k;      // [tokens, kv_heads, dim]
    const float* v;      // [tokens, kv_heads, v_dim], or null
    const float* table;  // [positions, rotated]: cosines, then sines
    const int64_t* positions;
    const int64_t* slots;  // negative: do not write
    void* k_cache;         // [blocks, block_size, kv_heads, dim]
    void* v_cache;         // [blocks, block_size, kv_heads, v_dim]
    const void* q_norm;    // [dim], or null
    const void* k_norm;
    void* k_scales;  // [blocks, block_size, kv_heads] bfloat16: of codes
    void* v_scales;
    int64_t tokens, heads, kv_heads, dim, v_dim, rotated, block_size;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides, in elements
    int64_t k_block, k_slot, k_cache_head, v_block, v_slot, v_cache_head;
    int64_t k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head;
    int64_t cache_storage, norm_storage;
    double eps;
};

// out = activation(gate) * up, with gate and up the halves of each row of x.
struct ActArgs {
    const float* x;  // [rows, 2 * inner]
    float* out;      // [rows, inner]
    int64_t rows, inner, x_stride, out_stride;
    int64_t kind;  // 0: silu, 1: gelu with tanh
};

// out = table[ids] * scale
struct EmbedArgs {
    const int64_t* ids;  // [rows]
    const void* table;   // [vocab, dim]
    float* out;          // [rows, dim]
    int64_t rows, vocab, dim, out_stride, table_storage;
    double scale;
};

// out = x + y, where the architecture has no norm to fold it into
struct AddArgs {
    const float* x;
    const float* y;
    float* out;
    int64_t rows, dim, x_stride, y_stride, out_stride;
};

// One function of every element. out may be x.
struct MapArgs {
    const float* x;  // [rows, dim]
    float* out;      // [rows, dim]
    int64_t rows, dim, x_stride, out_stride;
    int64_t kind;  // 0: x * value, 1: value * tanh(x / value)
    double value;
};

// What the ops of a decode step read, from the rows and positions that the host wrote.
struct DecodeInputArgs {
    const int64_t* rows;     // [n]: which row of the tables
    const int64_t* starts;   // [n]: position of the row's token
    const int32_t* tokens;   // [table rows, max_len]
    const int32_t* blocks;   // [table rows, max_blocks]
    int64_t* ids;            // [n]
    int64_t* slots;          // [n]
    int32_t* table_rows;     // [n]
    int32_t* context;        // [n]
    int64_t n, token_stride, block_stride, block_size;
};

// A row's largest logit, and whose it is.
struct Best {
    float value;
    int64_t at;
};

// The likeliest token of each row: the first of equals, -1 where logits hold no finite maximum.
struct ChooseArgs {
    const float* logits;  // [rows, vocab]
    int64_t* out;         // [rows]; null: see bests
    const int64_t* on;    // where it holds 0 the op does nothing; null: always on
    const int64_t* table_row;  // [rows]: the choice is also written to tokens[table_row, start + 1]; null: it is not
    const int64_t* starts;     // [rows]
    int32_t* tokens;           // [table rows, max_len]
    Best* bests;               // [rows]: of a rank's part of the vocabulary, for PickArgs; nothing else is written then
    int64_t rows, vocab, stride, token_stride;
    int64_t first;  // the token of the first logit
};

// The likeliest of the tokens that ranks found in their parts of the vocabulary, which are in the order of the ranks.
struct PickArgs {
    const Best* bests;  // [ranks, rows]
    int64_t* out;       // these as of ChooseArgs
    const int64_t* on;
    const int64_t* table_row;
    const int64_t* starts;
    int32_t* tokens;
    int64_t rows, ranks, rank_stride, token_stride;
};

}  // namespace mill
