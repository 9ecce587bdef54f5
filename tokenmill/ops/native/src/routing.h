// Routing: which experts every row goes to, and how much of each. And products of heads with matrices of their own.
#pragma once

#include <cstdint>

namespace mill {

constexpr uint32_t ROUTE = 73, HEADS = 74, ENTER = 92, FETCH = 93, FORESEE = 94;

// What steps and whoever brings experts tell each other (offload/expert_slots.py). A call: one layer's choice of experts.
enum Told : int64_t {
    TOLD_CALL,         // how many there were, the present one included
    TOLD_LAYER,        // whose, among the layers with experts
    TOLD_ASKED,        // the last call that waited for experts
    TOLD_ANSWERED,     // the last one whose experts are there; negative: they cannot be had (and none any more, if it is beyond all calls)
    TOLD_STREAM,       // the last one that chose most experts: all of the next layer are to be brought
    TOLD_WISHED,       // the last one that foresaw experts of the next layer
    TOLD_MAY_FORESEE,  // whether calls foresee at all
    TOLD_FORESEES,     // whether the present one does
    TOLD_STALLS,       // calls that waited, and for how many nanoseconds
    TOLD_STALL_NS,
    TOLD_HITS,      // experts that were there, were not, and were on their way or there because they were foreseen
    TOLD_MISSES,
    TOLD_FORESEEN,
    TOLD_NUMBERS,  // how many of these there are
};
constexpr int64_t MOST_OF_THEM = 3, MOST_PARTS = 4;  // of all experts: who chooses so many is taken to choose all

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

// The choice that the next layer's router would make of this layer's input, as a wish.
struct ForeseeArgs {
    RouteArgs route;
    int64_t* told;
    int64_t* wish;        // [experts]: the last call that foresaw it
    const int64_t* slot;  // [experts] of the next layer
    int64_t bell;
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
