// The ops on matrices: what they take.
#pragma once

#include "formats.h"

namespace mill {

enum MatrixKind : uint32_t { MATMUL = 1, REPACK = 2, TAKE_ROWS = 3, READ_ALL = 4, MULTIPLY_BYTES = 5 };

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

// Blocks of a GGUF format (or dense values), row after row -> panels. Row r of the panels is source row order[r].
struct RepackArgs {
    const uint8_t* source;
    const int32_t* order;  // nullptr: as they come
    uint8_t* panels;
    int64_t rows;
    int64_t columns;
    int64_t form;
};

// out[i] = row ids[i] of a packed matrix, as floats. Ids outside of it give zeros.
struct TakeRowsArgs {
    const int64_t* ids;
    float* out;
    int64_t out_stride;
    int64_t m;  // see rows_of
    int64_t k;
    int64_t num_segments;
    Segment segments[MAX_SEGMENTS];
};

// For measuring ceilings, see kernels/ceilings.cpp.
struct CeilingArgs {
    const uint8_t* data;
    int64_t bytes;
    int64_t repeats;
    uint64_t* sink;  // [64]
};

}  // namespace mill
