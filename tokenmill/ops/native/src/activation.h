// Activations of gated blocks.
#pragma once

#include "vec.h"

namespace mill {
namespace TM_NS {

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// 0.5 x (1 + tanh(u)) is x / (1 + e^(-2 u))
inline Vec gelu_tanh(Vec x) {
    Vec u = (x + x * x * x * 0.044715f) * 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return x / (1.0f + exponential(-u));
}

template <Vec (*activation)(Vec)>
inline void gated(const float* gate, const float* up, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, activation(load(gate + i)) * load(up + i));
    if (i == n) return;
    float rest[W] = {};
    for (int64_t j = i; j < n; j++) rest[j - i] = gate[j];
    Vec done = activation(load(rest));
    for (int64_t j = i; j < n; j++) out[j] = done[j - i] * up[j];
}

}  // namespace TM_NS
}  // namespace mill
