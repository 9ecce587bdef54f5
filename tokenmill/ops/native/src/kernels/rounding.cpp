// Rounds rows of floats to blocks of 32 small integers, by the operations of tokenmill/quant/rounding.py in their order.
#include "matrix.h"
#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {

constexpr int64_t Q4_0 = 2, Q4_1 = 3;  // as GGUF numbers them; else Q8_0
constexpr float TINY = 0x1p-14f;       // the least normal f16

// The nearest integer, of two the even one; |x| is far below 2^22.
static inline float nearest(float x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
    return (x + MAGIC) - MAGIC;
}

// Of what is not a number, the least.
static inline float limited(float x, float low, float high) { return !(x >= low) ? low : x > high ? high : x; }

// What a group's scale becomes in 16 bits: never nothing, which would make every weight infinite.
static inline Half scale_of(float extent, float reach) {
    const float scale = extent / reach;
    Half half;
    narrow(scale == 0 ? 1.0f : scale < TINY ? TINY : scale, &half);
    return half;
}

static inline void put_half(Half half, uint8_t* to) { __builtin_memcpy(to, &half, 2); }

static inline void put_nibbles(const float* codes, uint8_t* to) {  // of -8 to 7
    for (int i = 0; i < 16; ++i) to[i] = static_cast<uint8_t>((int(codes[i]) + 8) | (int(codes[16 + i]) + 8) << 4);
}

// A block of 32 values whose group has this scale, and the code `zero` for zero.
static inline uint8_t* put_block(const float* x, int64_t format, Half half, float zero, uint8_t* to) {
    const float scale = widen(half), least = format == Q4_0 || format == Q4_1 ? -8.0f : -127.0f;
    const float most = format == Q4_0 || format == Q4_1 ? 7.0f : 127.0f;
    float codes[GROUP];
    for (int i = 0; i < GROUP; ++i) codes[i] = limited(nearest(x[i] / scale) + zero, least, most);
    put_half(half, to);
    to += 2;
    if (format == Q4_1) {
        Half lowest;  // what the code 0 of 0 to 15 stands for
        narrow(-(zero + 8.0f) * scale, &lowest);
        put_half(lowest, to);
        to += 2;
    }
    if (format == Q4_0 || format == Q4_1) {
        put_nibbles(codes, to);
        return to + 16;
    }
    for (int i = 0; i < GROUP; ++i) to[i] = static_cast<uint8_t>(static_cast<int8_t>(int(codes[i])));
    return to + 32;
}

template <class T>
static uint8_t* round_row(const RoundArgs& a, const T* from, uint8_t* to) {
    float x[MOST_GROUP];
    for (int64_t k = 0; k < a.columns; k += a.group) {
        float low = 0, high = 0;  // zero always has a code
        bool wrong = false;       // what is not a number spoils its group, as the sampler is to notice
        for (int64_t i = 0; i < a.group; ++i) x[i] = widen(from[k + i]);
        for (int64_t i = 0; i < a.group; ++i) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            wrong |= x[i] != x[i];
        }
        if (wrong) high = __builtin_nanf("");
        Half scale;
        float zero = 0;
        if (a.format == Q4_1) {
            scale = scale_of(high - low, 15.0f);
            zero = limited(nearest(-8.0f - low / widen(scale)), -8.0f, 7.0f);
        } else {
            scale = scale_of(-low > high ? -low : high, a.format == Q4_0 ? 7.5f : 127.0f);
        }
        for (int64_t i = 0; i < a.group; i += GROUP) to = put_block(x + i, a.format, scale, zero, to);
    }
    return to;
}

static void round_rows(const void* args, Team& team) {
    const RoundArgs& a = *static_cast<const RoundArgs*>(args);
    const int64_t bytes = a.columns / GROUP * (a.format == Q4_0 ? 18 : a.format == Q4_1 ? 20 : 34);
    int64_t begin, end;
    team.share(a.rows, begin, end);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * a.columns;
        uint8_t* to = a.blocks + row * bytes;
        switch (a.storage) {
            case 0: round_row(a, static_cast<const float*>(a.source) + at, to); break;
            case 1: round_row(a, static_cast<const Half*>(a.source) + at, to); break;
            default: round_row(a, static_cast<const Brain*>(a.source) + at, to);
        }
    }
}

}  // namespace TM_NS

extern const OpEntry TM_OPS(rounding)[] = {
    {ROUND, sizeof(RoundArgs), TM_NS::round_rows, nullptr},
    {},
};

}  // namespace mill
