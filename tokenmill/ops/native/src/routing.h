// Routing: which experts every row goes to, and how much of each. And products of heads with matrices of their own.
#pragma once

#include <cstdint>

namespace mill {

constexpr uint32_t ROUTE = 73, HEADS = 74;

// Softmax over all experts, then the top_k likeliest: of all, or of those in the top_groups groups with the best expert.
struct RouteArgs {
    const float* x;       // [rows, hidden]
    const float* router;  // [experts, hidden]
    float* shares;        // [rows, top_k]
    int64_t* chosen;      // [rows, top_k], the likeliest first; of equal ones the first
    int64_t rows, hidden, experts, x_stride;
    int64_t top_k, groups, top_groups;
    int64_t normalize;  // shares of a row sum to one
    double scale;       // multiplies them
};

// out[row][head] = beside[row][head], then weight[head] times x[row][head]
struct HeadsArgs {
    const float* x;
    const float* weight;  // [heads][rows_of_weight][columns]; transposed: [heads][columns][rows_of_weight]
    const float* beside;  // or nullptr
    float* out;
    int64_t rows, heads, rows_of_weight, columns, transposed, width_beside;
    // Elements from row to row, and from head to head.
    int64_t x_stride, x_head, beside_stride, beside_head, out_stride, out_head;
};

}  // namespace mill
