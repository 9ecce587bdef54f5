// What this machine can do at most: reading memory, and multiplying small integers. Benchmarks compare with these.
#include "matrix.h"
#include "ops.h"

#if TM_LEVEL >= TM_AVX2
#include <immintrin.h>
#elif TM_LEVEL >= TM_NEON
#include <arm_neon.h>
#endif

namespace TM_NS {

using namespace mill;

// Reads all bytes, each thread its share, `repeats` times; a multiple of 512 bytes per thread.
static void read_all(const void* args, Team& team) {
    const CeilingArgs& a = *static_cast<const CeilingArgs*>(args);
    int64_t begin, end;
    team.share(a.bytes / 512, begin, end);
    typedef uint64_t Vector __attribute__((vector_size(64), aligned(64), may_alias));
    Vector sums[8] = {};
    for (int64_t repeat = 0; repeat < a.repeats; ++repeat)
        for (int64_t at = begin; at < end; ++at) {
            const Vector* line = reinterpret_cast<const Vector*>(a.data + at * 512);
            for (int i = 0; i < 8; ++i) sums[i] ^= line[i];
        }
    uint64_t sum = 0;
    for (const Vector& one : sums)
        for (int i = 0; i < 8; ++i) sum ^= one[i];
    a.sink[team.index % 64] = sum;
}

// `repeats` times 8 independent vector products of unsigned and signed bytes; returns how many multiplications each is.
static void multiply_bytes(const void* args, Team& team) {
    const CeilingArgs& a = *static_cast<const CeilingArgs*>(args);
    int64_t count = 0;
#if TM_LEVEL >= TM_VNNI
    __m512i sums[12], x = _mm512_set1_epi8(static_cast<char>(a.repeats)), y = _mm512_set1_epi8(3);
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    for (int64_t repeat = 0; repeat < a.repeats; ++repeat)
        for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, x, y);
    for (auto& sum : sums) count += _mm512_reduce_add_epi32(sum);
#elif TM_LEVEL >= TM_AVX2
    __m256i sums[8], x = _mm256_set1_epi8(static_cast<char>(a.repeats)), y = _mm256_set1_epi8(3);
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (int64_t repeat = 0; repeat < a.repeats; ++repeat)
        for (auto& sum : sums) {
            __asm__ volatile("" : "+x"(x));  // the product is computed each time
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, y));
        }
    for (auto& sum : sums) count += _mm256_extract_epi32(sum, 0);
#elif TM_LEVEL >= TM_DOTPROD
    int32x4_t sums[12];
    int8x16_t x = vdupq_n_s8(static_cast<int8_t>(a.repeats)), y = vdupq_n_s8(3);
    for (auto& sum : sums) sum = vdupq_n_s32(0);
    for (int64_t repeat = 0; repeat < a.repeats; ++repeat)
        for (auto& sum : sums) sum = vdotq_s32(sum, x, y);
    for (auto& sum : sums) count += vaddvq_s32(sum);
#elif TM_LEVEL >= TM_NEON
    int16x8_t sums[12];
    int8x8_t x = vdup_n_s8(static_cast<int8_t>(a.repeats)), y = vdup_n_s8(3);
    for (auto& sum : sums) sum = vdupq_n_s16(0);
    for (int64_t repeat = 0; repeat < a.repeats; ++repeat)
        for (auto& sum : sums) {
            __asm__ volatile("" : "+w"(x));  // the product is computed each time
            sum = vmlal_s8(sum, x, y);
        }
    for (auto& sum : sums) count += vgetq_lane_s16(sum, 0);
#else
    for (int64_t repeat = 0; repeat < a.repeats; ++repeat) count += static_cast<uint8_t>(repeat) * 3;
#endif
    a.sink[team.index % 64] = static_cast<uint64_t>(count);
}

}  // namespace TM_NS

namespace mill {
extern const OpEntry TM_OPS(ceilings)[] = {
    {READ_ALL, sizeof(CeilingArgs), TM_NS::read_all, nullptr},
    {MULTIPLY_BYTES, sizeof(CeilingArgs), TM_NS::multiply_bytes, nullptr},
    {},
};
}
