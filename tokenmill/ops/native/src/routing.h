// Routing: which experts every row goes to, and how much of each.
#pragma once

#include <cstdint>

namespace mill {

constexpr uint32_t ROUTE = 73;

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

}  // namespace mill
