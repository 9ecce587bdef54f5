// Codes: a head of keys or values in eight bits with one scale, as tokenmill/ops/kv_forms.py defines it.
#pragma once

#include "vec.h"

namespace mill {
namespace TM_NS {

// Whether what a cache stores has to be multiplied with scales that stand beside it.
template <class T>
constexpr bool scaled = false;
template <>
inline constexpr bool scaled<int8_t> = true;

// The least bfloat16 that is not below x, which is positive or not finite.
inline Brain rounded_up(float x) {
    if (x != x) return {0x7fc0};
    return {uint16_t((as_bits(x) + 0xffff) >> 16)};
}

// The largest size of an element; not a number where any is none.
inline float extent(const float* x, int64_t dim) {
    const Vec zero = {};
    Vec most = zero;
    Ints wrong = {};
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        const Vec v = load(x + i);
        most = larger(v < zero ? -v : v, most);
        wrong |= v != v;
    }
    float found = max_lane(most);
    bool any = false;
    for (int lane = 0; lane < W; lane++) any |= wrong[lane] != 0;
    for (; i < dim; i++) {
        any |= x[i] != x[i];
        const float size = x[i] < 0 ? -x[i] : x[i];
        found = size > found ? size : found;
    }
    return any ? __builtin_nanf("") : found;
}

inline void write_codes(const float* x, int64_t dim, int8_t* codes, Brain* scale) {
    const float wanted = extent(x, dim) / 127.0f;
    *scale = wanted < 1e-30f ? Brain{0x3f80} : rounded_up(wanted);  // zeros have the scale one
    const float step = widen(*scale);
    if (!__builtin_isfinite(step)) {  // the head is lost, and its reader will notice
        for (int64_t i = 0; i < dim; i++) codes[i] = 0;
        return;
    }
    const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        const Ints whole = as_ints(load(x + i) / step + magic) - as_ints(magic);
        for (int lane = 0; lane < W; lane++) codes[i + lane] = int8_t(whole[lane]);
    }
    for (; i < dim; i++) codes[i] = int8_t(int32_t(as_bits(x[i] / step + magic[0])) - int32_t(as_bits(magic[0])));
}

}  // namespace TM_NS
}  // namespace mill
