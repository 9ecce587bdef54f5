// Arguments of what LoRA adapters add to a product.
#pragma once

#include <cstdint>

namespace mill {

constexpr uint32_t kLowRank = 75;
constexpr int64_t MAX_SECTIONS = 3;  // q, k, v

// out[t][n] += sum over r of up[a][r][n] * (sum over k of down[a][s * rank + r][k] * x[t][k]), with a the slot of token
// t and s the section of column n. Tokens whose slot is negative stay as they are.
struct LowRankArgs {
    const float* x;          // [tokens, columns]
    float* out;              // [tokens, rows]
    const int64_t* adapter;  // [tokens]: slots
    const void* down;        // [slots, sections * rank, columns]
    const void* up;          // [slots, rank, rows]
    const int64_t* ranks;    // [slots]: how many of `rank` are used
    int64_t tokens;          // may be negative: see rows_of in team.h
    int64_t columns, rows, rank, sections, x_stride, out_stride;
    int64_t storage;             // of down and up, as of elementwise.h
    int64_t ends[MAX_SECTIONS];  // of sections, among the columns of out
};

}  // namespace mill
