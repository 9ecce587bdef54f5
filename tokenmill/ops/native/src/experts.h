// Grouped products of experts: tokens are sorted by the experts that they chose, and the rows of each are multiplied with its
// packed matrices: gate and up, then the activation, then down. kernels/matrix.cpp includes this behind its products.
//
// A row's result is computed by the same operations in the same order whatever other rows and threads there are.
#pragma once

#include "activation.h"
#include "matrix.h"
#include "ops.h"
#include "thread_scratch.h"

namespace TM_NS {

constexpr int64_t EXPERT_ROWS = 128;   // of one expert that a thread takes at once: their inputs stay in a near cache
constexpr int64_t EXPERT_ITEMS = 4;    // pieces of work for every thread, where there are enough panels
constexpr int64_t COMBINED_COLUMNS = 256;

// The choices (row * top_k + number of the choice) in the order of their experts. Each thread sorts for itself: that takes
// less time than to wait for another one.
struct Sorted {
    int32_t* begins;  // [experts + 1]: where the choices of an expert are
    int32_t* order;   // [choices]: which choice stands at a place
    int32_t* places;  // [choices]: at which place a choice stands; -1: of no expert that is here
    int64_t active, blocks;  // experts with rows, and pieces of at most EXPERT_ROWS rows
};

static Sorted sort_choices(const ExpertsArgs& a, int64_t choices, int32_t* memory) {
    Sorted s{memory, memory + a.experts + 1, memory + a.experts + 1 + choices, 0, 0};
    for (int64_t e = 0; e <= a.experts; ++e) s.begins[e] = 0;
    const auto is_here = [&](int64_t i) { return a.chosen[i] >= 0 && a.chosen[i] < a.experts; };
    for (int64_t i = 0; i < choices; ++i)
        if (is_here(i)) ++s.begins[a.chosen[i]];
    int32_t at = 0;
    for (int64_t e = 0; e < a.experts; ++e) {
        const int32_t rows = s.begins[e];
        s.active += rows > 0;
        s.blocks += (rows + EXPERT_ROWS - 1) / EXPERT_ROWS;
        s.begins[e] = at;
        at += rows;
    }
    for (int64_t i = 0; i < choices; ++i) {
        s.places[i] = is_here(i) ? s.begins[a.chosen[i]]++ : -1;
        if (s.places[i] >= 0) s.order[s.places[i]] = static_cast<int32_t>(i);
    }
    for (int64_t e = a.experts; e > 0; --e) s.begins[e] = s.begins[e - 1];  // each stands where the next one begins
    s.begins[0] = 0;
    return s;
}

// A piece of work: rows of one expert with some of its panels.
struct ExpertItem {
    int64_t expert, first, rows, chunk;
};

// Walks through the pieces in their order; numbers only grow.
struct ExpertItems {
    const ExpertsArgs& a;
    const Sorted& sorted;
    int64_t chunks;  // of the panels of each expert
    int64_t expert = 0, before = 0;

    int64_t count() const { return sorted.blocks * chunks; }

    ExpertItem item(int64_t number) {
        for (;; ++expert) {
            const int64_t rows = sorted.begins[expert + 1] - sorted.begins[expert];
            const int64_t mine = (rows + EXPERT_ROWS - 1) / EXPERT_ROWS * chunks;
            if (number - before >= mine) {
                before += mine;
                continue;
            }
            const int64_t block = (number - before) / chunks, begin = block * EXPERT_ROWS;
            const int64_t left = rows - begin;
            return {expert, sorted.begins[expert] + begin, left < EXPERT_ROWS ? left : EXPERT_ROWS, (number - before) % chunks};
        }
    }
};

// The product of one piece: `row_at` says where its inputs are.
template <class RowAt>
static void multiply_item(const ExpertMatrix& matrix, int64_t k, const ExpertItem& item, int64_t chunks, RowAt row_at,
                          char* memory, float* out, int64_t out_stride) {
    MatmulArgs product{};
    product.out = out + item.first * out_stride;
    product.out_stride = out_stride;
    product.m = item.rows;
    product.k = k;
    product.num_segments = matrix.num_segments;
    for (int64_t s = 0; s < matrix.num_segments; ++s) product.segments[s] = matrix.segments[s];
    const Plan plan = plan_of(product, 0);
    const int64_t begin = plan.panels * item.chunk / chunks, end = plan.panels * (item.chunk + 1) / chunks;
    if (begin == end) return;
    const Inputs inputs = inputs_at(memory, plan);
    prepare(plan, inputs, 0, (plan.m + QUAD - 1) / QUAD, row_at);
    multiply_panels(product, plan, inputs, begin, end);
}

// Room for the inputs of `rows` rows in either form.
static int64_t room_for_inputs(int64_t rows, int64_t k) {
    return static_cast<int64_t>(InputSizes(Plan{rows, k, k / GROUP, 0, true, true}).total());
}

static void activate(const ExpertsArgs& a, const float* gate_up, float* out) {
    if (a.activation == 0)
        mill::TM_NS::gated<mill::TM_NS::silu>(gate_up, gate_up + a.inner, out, a.inner);
    else
        mill::TM_NS::gated<mill::TM_NS::gelu_tanh>(gate_up, gate_up + a.inner, out, a.inner);
}

// out = the sum of what a row's experts gave, by their shares, in the order of its choices.
static void combine(const ExpertsArgs& a, const Sorted& sorted, const float* done, int64_t rows, Team& team) {
    const int64_t parts = (a.hidden + COMBINED_COLUMNS - 1) / COMBINED_COLUMNS;
    int64_t begin, end;
    team.share(rows * parts, begin, end);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / parts, at = unit % parts * COMBINED_COLUMNS;
        const int64_t width = a.hidden - at < COMBINED_COLUMNS ? a.hidden - at : COMBINED_COLUMNS;
        float* out = a.out + row * a.out_stride + at;
        for (int64_t i = 0; i < width; ++i) out[i] = 0;
        for (int64_t choice = row * a.top_k; choice < (row + 1) * a.top_k; ++choice) {
            if (sorted.places[choice] < 0) continue;
            const float share = a.share[choice];
            const float* from = done + sorted.places[choice] * a.hidden + at;
            for (int64_t i = 0; i < width; ++i) out[i] += share * from[i];
        }
    }
}

static size_t experts_scratch(const void* args, int64_t rows) {
    const ExpertsArgs& a = *static_cast<const ExpertsArgs*>(args);
    return static_cast<size_t>(rows_of(a.rows, rows) * a.top_k * (2 * a.inner + a.hidden)) * sizeof(float);
}

static void experts(const void* args, Team& team) {
    const ExpertsArgs& a = *static_cast<const ExpertsArgs*>(args);
    const int64_t rows = rows_of(a.rows, team.rows), choices = rows * a.top_k;
    const int64_t at_once = choices < EXPERT_ROWS ? choices : EXPERT_ROWS;
    const int64_t sorting = round_up((a.experts + 1 + 2 * choices) * int64_t(sizeof(int32_t)), 64);
    const int64_t gate_room = room_for_inputs(at_once, a.hidden), down_room = room_for_inputs(at_once, a.inner);
    const int64_t inputs_room = gate_room > down_room ? gate_room : down_room;
    const int64_t room = sorting + inputs_room + at_once * a.inner * int64_t(sizeof(float));
    char* const memory = reinterpret_cast<char*>(thread_scratch(static_cast<size_t>(room) / sizeof(float) + 1));
    char* const prepared = memory + sorting;
    float* const active = reinterpret_cast<float*>(prepared + inputs_room);  // [at_once][inner]
    float* const gate_up = reinterpret_cast<float*>(team.scratch());         // [choices][2 * inner], by place
    float* const done = gate_up + choices * 2 * a.inner;                     // [choices][hidden], by place

    const Sorted sorted = sort_choices(a, choices, reinterpret_cast<int32_t*>(memory));
    int64_t chunks = 1;
    while (team.count > 1 && sorted.blocks * chunks < EXPERT_ITEMS * team.count && chunks < EXPERT_ITEMS * team.count) ++chunks;
    ExpertItems first{a, sorted, chunks};
    for (int64_t number = team.next(); number < first.count(); number = team.next()) {
        const ExpertItem item = first.item(number);
        const int32_t* order = sorted.order + item.first;
        const auto row_at = [&](int64_t row) { return a.x + order[row] / a.top_k * a.x_stride; };
        multiply_item(a.gate_up[item.expert], a.hidden, item, chunks, row_at, prepared, gate_up, 2 * a.inner);
    }
    team.barrier();
    ExpertItems second{a, sorted, chunks};
    for (int64_t number = team.next(); number < second.count(); number = team.next()) {
        const ExpertItem item = second.item(number);
        for (int64_t row = 0; row < item.rows; ++row)
            activate(a, gate_up + (item.first + row) * 2 * a.inner, active + row * a.inner);
        const auto row_at = [&](int64_t row) { return active + row * a.inner; };
        multiply_item(a.down[item.expert], a.inner, item, chunks, row_at, prepared, done, a.hidden);
    }
    team.barrier();
    combine(a, sorted, done, rows, team);
}

}  // namespace TM_NS
