// Vec: as many floats as one register of the level being compiled holds, with the few functions the kernels need.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops.h"

#if defined(__SSE__)
#include <immintrin.h>
#elif TM_LEVEL >= TM_NEON
#include <arm_neon.h>
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
constexpr int REGISTERS = W == 16 || TM_LEVEL >= TM_NEON ? 32 : 16;

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

inline float widen(int8_t x) { return float(x); }

inline float widen(Brain x) { return as_float(uint32_t(x.bits) << 16); }

inline float widen(Half x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif TM_LEVEL >= TM_NEON
    __fp16 half;
    std::memcpy(&half, &x, sizeof half);
    return half;
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
#elif TM_LEVEL >= TM_NEON
    const __fp16 half = static_cast<__fp16>(x);
    std::memcpy(to, &half, sizeof half);
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
#elif TM_LEVEL >= TM_NEON
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
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
#elif TM_LEVEL >= TM_NEON
    return (Vec)vshlq_n_u32(vmovl_u16(vld1_u16((const uint16_t*)p)), 16);
#else
    Vec v;
    for (int i = 0; i < W; i++) v[i] = widen(p[i]);
    return v;
#endif
}

inline Vec load_wide(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif TM_LEVEL >= TM_NEON
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
#else
    Vec v;
    for (int i = 0; i < W; i++) v[i] = widen(p[i]);
    return v;
#endif
}

inline void store_narrow(float* p, Vec x) { store(p, x); }

inline void store_narrow(Half* p, Vec x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif TM_LEVEL >= TM_NEON
    vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    for (int i = 0; i < W; i++) narrow(x[i], p + i);
#endif
}

inline void store_narrow(Brain* p, Vec x) {
    for (int i = 0; i < W; i++) narrow(x[i], p + i);
}

#if defined(__SSE__)
#define TM_FOUR  // there are registers of four floats, and a way to transpose them
typedef __m128 Four;

// Four elements of each storage type.

inline __m128 load4(const float* p) { return _mm_loadu_ps(p); }

inline __m128 load4(const Half* p) {
#if defined(__F16C__)
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p));
#else
    return _mm_setr_ps(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]));
#endif
}

inline __m128 load4(const Brain* p) {
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p)));
}

inline __m128 load4(const int8_t* p) {
#if defined(__AVX2__)
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
#else
    return _mm_setr_ps(widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]));
#endif
}

inline void store4(float* p, Four x) { _mm_storeu_ps(p, x); }

#define TM_TRANSPOSE4 _MM_TRANSPOSE4_PS
#elif TM_LEVEL >= TM_NEON
#define TM_FOUR
typedef Vec Four;

template <class T>
inline Four load4(const T* p) {
    return load_wide(p);
}

inline void store4(float* p, Four x) { store(p, x); }

inline void transpose4(Four& a, Four& b, Four& c, Four& d) {
    const float32x4x2_t low = vtrnq_f32((float32x4_t)a, (float32x4_t)b), high = vtrnq_f32((float32x4_t)c, (float32x4_t)d);
    a = (Vec)vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
    b = (Vec)vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
    c = (Vec)vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
    d = (Vec)vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}
#define TM_TRANSPOSE4 transpose4
#endif

// Sums and maxima over the lanes, always in the same order.

inline float sum(Vec v) {
#if TM_LEVEL >= TM_NEON
    const float32x4_t pairs = vpaddq_f32((float32x4_t)v, (float32x4_t)v);
    return vpadds_f32(vget_low_f32(pairs));
#else
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
#endif
}

// In each quarter (four lanes) of the result: the sums over the same quarter of a, b, c and d.
#if defined(__AVX512F__)
inline Vec sum_quad(Vec a, Vec b, Vec c, Vec d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    return (Vec)_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}
#elif defined(__AVX2__)
inline Vec sum_quad(Vec a, Vec b, Vec c, Vec d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d), _mm256_unpackhi_ps((__m256)c, (__m256)d));
    return (Vec)_mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}
#elif TM_LEVEL >= TM_NEON
inline Vec sum_quad(Vec a, Vec b, Vec c, Vec d) {
    const float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b), cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    return (Vec)vpaddq_f32(ab, cd);
}
#else
inline Vec sum_quad(Vec a, Vec b, Vec c, Vec d) { return Vec{sum(a), sum(b), sum(c), sum(d)}; }
#endif

// How a product of two rows of floats is summed wherever it is taken: one sum for each of kParts neighbours (dims i,
// i + kParts, ...), which are then added by pairs, in the order of kPartOrder: that of sum_quad, and then of join_parts.
#if defined(__AVX512F__)
constexpr int kParts = 4;
constexpr int kPartOrder[kParts] = {0, 2, 1, 3};
#elif defined(__AVX2__)
constexpr int kParts = 8;
constexpr int kPartOrder[kParts] = {0, 2, 1, 3, 4, 6, 5, 7};
#else
constexpr int kParts = 4;
constexpr int kPartOrder[kParts] = {0, 1, 2, 3};
#endif
constexpr int kAcross = W / kParts;  // rows whose parts fill a vector

// Rows become vectors of kParts neighbours of each.
inline void across(const Vec rows[kAcross], Vec out[kAcross]) {
#if defined(__AVX512F__)
    const __m512 a = (__m512)rows[0], b = (__m512)rows[1], c = (__m512)rows[2], d = (__m512)rows[3];
    const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee);
    const __m512 lower = _mm512_shuffle_f32x4(c, d, 0x44), higher = _mm512_shuffle_f32x4(c, d, 0xee);
    out[0] = (Vec)_mm512_shuffle_f32x4(low, lower, 0x88);
    out[1] = (Vec)_mm512_shuffle_f32x4(low, lower, 0xdd);
    out[2] = (Vec)_mm512_shuffle_f32x4(high, higher, 0x88);
    out[3] = (Vec)_mm512_shuffle_f32x4(high, higher, 0xdd);
#else
    out[0] = rows[0];
#endif
}

// kParts floats, again and again.
inline Vec repeat(const float* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
#else
    return load(p);
#endif
}

// The sums over all lanes of W vectors, of which each four went through sum_quad. Every sum is taken in the same order,
// whichever of the vectors it belongs to.
inline Vec join_quads(const Vec* q) {
#if defined(__AVX512F__)
    __m512 half[2];
    for (int i = 0; i < 2; i++) {
        const __m512 a = (__m512)q[2 * i], b = (__m512)q[2 * i + 1];
        half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return (Vec)_mm512_add_ps(_mm512_shuffle_f32x4(half[0], half[1], 0x88), _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
#elif defined(__AVX2__)
    const __m256 a = (__m256)q[0], b = (__m256)q[1];
    return (Vec)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
    return q[0];
#endif
}

// The sums over the kParts parts of W rows, which are in kParts / 4 results of sum_quad.
inline Vec join_parts(const Vec* q) {
    if constexpr (kParts == 4)
        return q[0];
    else
        return join_quads(q);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where either is not a number

inline float max_lane(Vec v) {
#if defined(__AVX512F__)
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
    const __m256 half = (__m256)v;
#endif
#if defined(__AVX2__)
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#elif TM_LEVEL >= TM_NEON
    return vmaxnmvq_f32((float32x4_t)v);
#else
    float f[W];
    std::memcpy(f, &v, sizeof f);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) f[i] = f[i] > f[i + step] ? f[i] : f[i + step];
    return f[0];
#endif
}

// e^x to about one unit in the last place; 0 below the smallest normal result, infinity above the largest.
inline Vec exponential(Vec x) {
#if defined(__AVX512F__)
    const Vec held = (Vec)_mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x);  // the second where it is not a number
    const Vec n = (Vec)_mm512_roundscale_ps((__m512)(held * 1.44269504f), 0);
    Vec r = held - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
#else
    const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    Vec held = x > all(88.8f) ? all(88.8f) : x;
    held = held < all(-87.4f) ? all(-87.4f) : held;
    Vec shifted = held * 1.44269504f + magic;
    Vec n = shifted - magic;
    Vec r = held - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
#endif
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
#if defined(__AVX512F__)
    const __mmask16 large = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(large, (__m512)p, (__m512)n);
#else
    Ints exponent = as_ints(shifted) - as_ints(magic);
    // In two steps, because 2^128 has no float of its own.
    Ints first = exponent >> 1;
    p = p * as_floats((first + 127) << 23) * as_floats((exponent - first + 127) << 23);
    Vec zero = Vec{};
    p = x < all(-87.33654f) ? zero : p;
    return x != x ? x : p;  // not a number stays so
#endif
}

// tanh(x), to about 1e-7 of 1.
inline Vec hyperbolic_tangent(Vec x) { return 1.0f - 2.0f / (1.0f + exponential(x + x)); }

}  // namespace TM_NS
}  // namespace mill
