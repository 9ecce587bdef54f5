// Vec: as many floats as one register of the level being compiled holds, with the few functions the kernels need.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops.h"

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace mill {
namespace TM_NS {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));

struct Half {  // IEEE binary16
    uint16_t bits;
};
struct Brain {  // bfloat16
    uint16_t bits;
};

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec all(float x) { return x - Vec{}; }

inline Vec as_floats(Ints v) {
    Vec r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}

inline Ints as_ints(Vec v) {
    Ints r;
    std::memcpy(&r, &v, sizeof r);
    return r;
}

inline float as_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

inline uint32_t as_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    return bits;
}

// One element of each storage type.

inline float widen(float x) { return x; }

inline float widen(Brain x) { return as_float(uint32_t(x.bits) << 16); }

inline float widen(Half x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinite, or not a number
    if (rest < 0x400) {                                                             // subnormal
        float small = float(rest) * 0x1p-24f;
        return as_float(sign | as_bits(small));
    }
    return as_float(sign | ((rest << 13) + 0x38000000));
#endif
}

inline void narrow(float x, float* to) { *to = x; }

inline void narrow(float x, Brain* to) {
    uint32_t bits = as_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        to->bits = uint16_t(bits >> 16 | 0x40);  // stays not a number
    } else {
        to->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

inline void narrow(float x, Half* to) {
#if defined(__F16C__)
    to->bits = uint16_t(_cvtss_sh(x, 0));
#else
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) {
        to->bits = uint16_t(sign | 0x7e00);
    } else if (rest >= 0x477ff000) {  // rounds beyond the largest
        to->bits = uint16_t(sign | 0x7c00);
    } else if (rest < 0x38800000) {  // subnormal: adding a half's last place times 2^23 lets the hardware round
        float shifted = as_float(rest) + 0.5f;
        to->bits = uint16_t(sign | (as_bits(shifted) - 0x3f000000));
    } else {
        rest += 0xc8000fff + (rest >> 13 & 1);
        to->bits = uint16_t(sign | rest >> 13);
    }
#endif
}

// W elements of each storage type.

inline Vec load_wide(const float* p) { return load(p); }

inline Vec load_wide(const Half* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Vec v;
    for (int i = 0; i < W; i++) v[i] = widen(p[i]);
    return v;
#endif
}

inline Vec load_wide(const Brain* p) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    Vec v;
    for (int i = 0; i < W; i++) v[i] = widen(p[i]);
    return v;
#endif
}

// Sums and maxima over the lanes, always in the same order.

inline float sum(Vec v) {
#if defined(__AVX512F__)
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
    Vec quarter = v;
#endif
    float f[4];
    std::memcpy(f, &quarter, sizeof f);
    return (f[0] + f[1]) + (f[2] + f[3]);
}

// The four sums, in one go: cheaper than four calls.
inline void sum4(Vec a, Vec b, Vec c, Vec d, float* to) {
#if defined(__AVX2__)
    __m128 part[4];
    const Vec given[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
        __m512 v = (__m512)given[i];
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
        __m256 half = (__m256)given[i];
#endif
        part[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _mm_storeu_ps(to, _mm_hadd_ps(_mm_hadd_ps(part[0], part[1]), _mm_hadd_ps(part[2], part[3])));
#else
    to[0] = sum(a);
    to[1] = sum(b);
    to[2] = sum(c);
    to[3] = sum(d);
#endif
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where either is not a number

inline float max_lane(Vec v) {
    float f[W];
    std::memcpy(f, &v, sizeof f);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) f[i] = f[i] > f[i + step] ? f[i] : f[i + step];
    return f[0];
}

// e^x to about one unit in the last place; 0 below the smallest normal result, infinity above the largest.
inline Vec exponential(Vec x) {
    const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    Vec held = x > all(88.8f) ? all(88.8f) : x;
    held = held < all(-87.4f) ? all(-87.4f) : held;
    Vec shifted = held * 1.44269504f + magic;
    Vec n = shifted - magic;
    Vec r = held - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    Ints exponent = as_ints(shifted) - as_ints(magic);
    // In two steps, because 2^128 has no float of its own.
    Ints first = exponent >> 1;
    p = p * as_floats((first + 127) << 23) * as_floats((exponent - first + 127) << 23);
    Vec zero = Vec{};
    p = x < all(-87.33654f) ? zero : p;
    return x != x ? x : p;  // not a number stays so
}

// tanh(x), to about 1e-7 of 1.
inline Vec hyperbolic_tangent(Vec x) { return 1.0f - 2.0f / (1.0f + exponential(x + x)); }

}  // namespace TM_NS
}  // namespace mill
