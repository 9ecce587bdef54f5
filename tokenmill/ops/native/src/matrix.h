// The ops on matrices: what they take.
#pragma once

#include "formats.h"

namespace mill {

enum MatrixKind : uint32_t { MATMUL = 1, REPACK = 2, TAKE_ROWS = 3, READ_ALL = 4, MULTIPLY_BYTES = 5, UNPACK = 6, ROUND = 7, EXPERTS = 8 };

// out[m][n] = sum over k of x[m][k] * weight[n][k], + bias[n]
struct MatmulArgs {
    const float* x;
    int64_t x_stride;  // elements from row to row
    float* out;
    int64_t out_stride;
    const float* bias;  // or nullptr
    int64_t m;          // see rows_of
    int64_t k;
    int64_t num_segments;
    Segment segments[MAX_SEGMENTS];  // one after the other along n
};

// Blocks of a GGUF format (or dense values), row after row -> panels of the form that keeps them (gguf_blocks.h), or of F32
// where none does. Row r of the panels is source row order[r].
struct RepackArgs {
    const uint8_t* source;
    const int32_t* order;  // nullptr: as they come
    const uint8_t* book;   // of formats that take their values from one
    uint8_t* panels;
    int64_t rows;
    int64_t columns;
    int64_t format;  // as GGUF numbers them
};

// The same rows as floats: out[r] = source row order[r].
struct UnpackArgs {
    const uint8_t* source;
    const int32_t* order;
    const uint8_t* book;
    void* out;  // [rows][columns]
    int64_t rows;
    int64_t columns;
    int64_t format;
    int64_t storage;  // of out: 0 float, 1 half, 2 bfloat16
};

// Rows of floats -> blocks of Q4_0, of Q4_1 (with a code for zero), or of Q8_0, row after row.
constexpr int64_t MOST_GROUP = 128;
struct RoundArgs {
    const void* source;  // [rows][columns]
    uint8_t* blocks;
    int64_t rows;
    int64_t columns;
    int64_t group;    // columns that share a scale: a multiple of 32, up to MOST_GROUP
    int64_t format;   // as GGUF numbers them
    int64_t storage;  // of source, as of UnpackArgs
};

// out[i] = row ids[i] - first of a packed matrix, as floats. Ids outside of it give zeros.
struct TakeRowsArgs {
    const int64_t* ids;
    float* out;
    int64_t out_stride;
    int64_t m;  // see rows_of
    int64_t k;
    int64_t first;
    int64_t num_segments;
    Segment segments[MAX_SEGMENTS];
};

// A matrix of one expert.
struct ExpertMatrix {
    int64_t num_segments;
    Segment segments[MAX_SEGMENTS];
};

// out[row] = sum over its choices of share * (down of the expert) times activation(gate) * up, see experts.h
struct ExpertsArgs {
    const float* x;              // [rows][hidden]
    const float* share;          // [rows][top_k]
    const int64_t* chosen;       // [rows][top_k]: experts; of one that is not there, nothing is added
    const ExpertMatrix* gate_up;  // [experts]: 2 * inner rows
    const ExpertMatrix* down;     // [experts]: hidden rows
    float* out;                  // [rows][hidden]
    int64_t x_stride;
    int64_t out_stride;
    int64_t rows;  // see rows_of
    int64_t top_k;
    int64_t experts;
    int64_t hidden;
    int64_t inner;
    int64_t activation;  // 0: silu, 1: gelu with tanh
};

// For measuring ceilings, see kernels/ceilings.cpp.
struct CeilingArgs {
    const uint8_t* data;
    int64_t bytes;
    int64_t repeats;
    uint64_t* sink;  // [64]
};

}  // namespace mill
