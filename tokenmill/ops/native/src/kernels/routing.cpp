// Scores of experts and the choice among them, by the operations of tokenmill/model/moe.py.
//
// A row's result is computed by the same operations in the same order whatever other rows and threads there are.
#include "routing.h"

#include <unistd.h>

#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {
namespace {

constexpr int64_t SCORED = 8;  // experts that a row is multiplied with at once

// out[i] = x times weights[i]; every product is one sum in the order of the columns.
template <int COUNT>
void dots(const float* x, const float* weights, int64_t dim, float* out) {
    Vec sums[COUNT] = {};
    int64_t k = 0;
    for (; k + W <= dim; k += W) {
        const Vec value = load(x + k);
        for (int i = 0; i < COUNT; i++) sums[i] += value * load(weights + i * dim + k);
    }
    for (int i = 0; i < COUNT; i++) {
        out[i] = sum(sums[i]);
        for (int64_t rest = k; rest < dim; rest++) out[i] += x[rest] * weights[i * dim + rest];
    }
}

// The place of the largest of the values that are not taken; the first of equal ones.
int64_t place_of_largest(const float* values, const bool* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// What is not a number makes all of a row so, which the sampler reports.
void spoil(const RouteArgs& a, float* shares, int64_t* chosen) {
    for (int64_t i = 0; i < a.top_k; i++) {
        shares[i] = __builtin_nanf("");
        chosen[i] = i;
    }
}

// Values below the best groups become zero, as probabilities.
void keep_best_groups(const RouteArgs& a, float* probs, bool* taken, float* best) {
    const int64_t each = a.experts / a.groups;
    for (int64_t g = 0; g < a.groups; g++) {
        taken[g] = false;
        best[g] = probs[g * each];
        for (int64_t i = 1; i < each; i++) best[g] = probs[g * each + i] > best[g] ? probs[g * each + i] : best[g];
    }
    for (int64_t n = 0; n < a.top_groups; n++) taken[place_of_largest(best, taken, a.groups)] = true;
    for (int64_t i = 0; i < a.experts; i++)
        if (!taken[i / each]) probs[i] = 0;
}

// scores become probabilities on the way; `taken` and `best` have room for a number per expert.
void choose(const RouteArgs& a, float* scores, bool* taken, float* best, float* shares, int64_t* chosen) {
    float top = scores[0], total = 0;
    for (int64_t i = 1; i < a.experts; i++) top = scores[i] > top ? scores[i] : top;
    for (int64_t i = 0; i < a.experts; i += W) {
        float some[W] = {};
        const int64_t n = a.experts - i < W ? a.experts - i : W;
        for (int64_t j = 0; j < n; j++) some[j] = scores[i + j] - top;
        const Vec powers = exponential(load(some));
        for (int64_t j = 0; j < n; j++) total += scores[i + j] = powers[j];
    }
    if (!(total > 0) || !__builtin_isfinite(total)) return spoil(a, shares, chosen);
    for (int64_t i = 0; i < a.experts; i++) scores[i] /= total;
    if (a.groups > 1) keep_best_groups(a, scores, taken, best);
    for (int64_t i = 0; i < a.experts; i++) taken[i] = false;
    float sum = 0;
    for (int64_t i = 0; i < a.top_k; i++) {
        chosen[i] = place_of_largest(scores, taken, a.experts);
        taken[chosen[i]] = true;
        shares[i] = scores[chosen[i]];
        sum += shares[i];
    }
    for (int64_t i = 0; i < a.top_k; i++) {
        if (a.normalize) shares[i] /= sum;
        shares[i] *= float(a.scale);
    }
}

// Of each row: a score and a best value per expert, and whether it is taken.
int64_t row_room(const RouteArgs& a) { return (a.experts * 9 + 63) / 64 * 64; }

size_t route_scratch(const void* args, int64_t rows) {
    const RouteArgs& a = *static_cast<const RouteArgs*>(args);
    return size_t(rows_of(a.rows, rows) * row_room(a));
}

void route(const void* args, Team& team) {
    const RouteArgs& a = *static_cast<const RouteArgs*>(args);
    const int64_t rows = rows_of(a.rows, team.rows), parts = (a.experts + SCORED - 1) / SCORED;
    const auto scores_of = [&](int64_t row) { return reinterpret_cast<float*>(team.scratch() + row * row_room(a)); };
    int64_t begin, end;
    team.share(rows * parts, begin, end);
    for (int64_t unit = begin; unit < end; unit++) {  // one part of the router after the other, which stays in the cache
        const int64_t row = unit % rows, first = unit / rows * SCORED;
        const float* x = a.x + row * a.x_stride;
        const float* weights = a.router + first * a.hidden;
        float* to = scores_of(row) + first;
        if (a.experts - first >= SCORED) {
            dots<SCORED>(x, weights, a.hidden, to);
            continue;
        }
        for (int64_t i = 0; i < a.experts - first; i++) dots<1>(x, weights + i * a.hidden, a.hidden, to + i);
    }
    team.barrier();
    team.share(rows, begin, end);
    for (int64_t row = begin; row < end; row++) {
        float* scores = scores_of(row);
        bool* taken = reinterpret_cast<bool*>(scores + 2 * a.experts);
        choose(a, scores, taken, scores + a.experts, a.shares + row * a.top_k, a.chosen + row * a.top_k);
    }
}

size_t foresee_scratch(const void* args, int64_t rows) {
    return route_scratch(&static_cast<const ForeseeArgs*>(args)->route, rows);
}

void foresee(const void* args, Team& team) {
    const ForeseeArgs& a = *static_cast<const ForeseeArgs*>(args);
    if (!a.told[TOLD_FORESEES]) return;  // written before the barrier in front of this op: all members see the same
    route(&a.route, team);
    team.barrier();
    if (team.index) return;
    const int64_t choices = rows_of(a.route.rows, team.rows) * a.route.top_k, call = a.told[TOLD_CALL];
    bool away = false;
    for (int64_t i = 0; i < choices; i++) {
        const int64_t expert = a.route.chosen[i];
        a.wish[expert] = call;
        away |= __atomic_load_n(&a.slot[expert], __ATOMIC_RELAXED) < 0;
    }
    if (!away) return;
    __atomic_store_n(&a.told[TOLD_WISHED], call, __ATOMIC_SEQ_CST);
    const char once = 1;
    [[maybe_unused]] const ssize_t rung = write(int(a.bell), &once, 1);  // a full pipe has rung already
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(routing)[] = {
    {ROUTE, sizeof(RouteArgs), TM_NS::route, TM_NS::route_scratch},
    {FORESEE, sizeof(ForeseeArgs), TM_NS::foresee, TM_NS::foresee_scratch},
    {},
};

}  // namespace mill
