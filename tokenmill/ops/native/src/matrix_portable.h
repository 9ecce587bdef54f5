// Products of packed panels with a tile of quantized inputs in plain C++: any CPU, and what the others are tested with.
#pragma once

#include "formats.h"
#include "half.h"

namespace TM_NS {

using namespace mill;

constexpr int MAX_ROWS = 4;

// codes[column of the group][row]
template <int BITS>
static inline void unpack(const uint8_t* at, uint8_t codes[GROUP][PANEL]) {
    for (int j = 0; j < 8; ++j)
        for (int row = 0; row < PANEL; ++row)
            for (int i = 0; i < 4; ++i) {
                const int byte = 4 * row + i;
                uint8_t code;
                if constexpr (BITS == 8) {
                    code = at[64 * j + byte];
                } else {
                    code = static_cast<uint8_t>(at[64 * (j % 4) + byte] >> (j < 4 ? 0 : 4) & 15);
                    if constexpr (BITS == 5) code |= static_cast<uint8_t>((at[256 + 8 * j + byte / 8] >> byte % 8 & 1) << 4);
                    if constexpr (BITS == 6) code |= static_cast<uint8_t>((at[256 + 64 * (j / 4) + byte] >> 2 * (j % 4) & 3) << 4);
                }
                codes[4 * j + i][row] = code;
            }
}

// scale[half of the group][row], and minimum[row] of group g of a panel.
template <class C>
static inline void group_scales(const uint8_t* panel, int64_t g, float scale[2][PANEL], float minimum[PANEL]) {
    const uint8_t* at = panel + C::scales_at(g);
    const uint8_t* small = at + SMALL_AT;
    const int64_t in = g % C::CHUNK;
    for (int row = 0; row < PANEL; ++row) {
        minimum[row] = 0;
        const float d = half_at(at + 2 * row);
        if constexpr (C::SCALES == SYMMETRIC) {
            scale[0][row] = half_at(at + (in * PANEL + row) * 2);
        } else if constexpr (C::SCALES == MINIMUM) {
            scale[0][row] = d;
            minimum[row] = half_at(at + (PANEL + row) * 2);
        } else if constexpr (C::SCALES == K_MINIMUM) {
            scale[0][row] = d * static_cast<float>(small[in * PANEL + row]);
            minimum[row] = -half_at(at + 2 * PANEL + 2 * row) * static_cast<float>(small[(8 + in) * PANEL + row]);
        } else {
            scale[0][row] = d * static_cast<float>(static_cast<int8_t>(small[2 * in * PANEL + row]));
            scale[1][row] = d * static_cast<float>(static_cast<int8_t>(small[(2 * in + 1) * PANEL + row]));
        }
        if constexpr (C::SCALES != K_SIXTEENTHS) scale[1][row] = scale[0][row];
    }
}

template <class C, int ROWS>
static void product(const uint8_t* panel, int64_t columns, const InputBlock* blocks, const int8_t* fine, int64_t stride,
                    float* out, int64_t out_stride, int width, const float* bias) {
    constexpr int ZERO = C::HAS_ZERO ? 1 << C::ZERO_SHIFT : 0;
    const int64_t groups = columns / GROUP;
    float totals[ROWS][PANEL] = {};
    for (int64_t g = 0; g < groups; ++g) {
        uint8_t codes[GROUP][PANEL];
        float scale[2][PANEL], minimum[PANEL];
        unpack<C::BITS>(panel + C::codes_at(g), codes);
        group_scales<C>(panel, g, scale, minimum);
        for (int row = 0; row < ROWS; ++row) {
            const InputBlock& x = blocks[g * stride + row];
            const int8_t* more = fine + GROUP * (g * stride + row);
            int32_t q[GROUP];
            for (int column = 0; column < GROUP; ++column) q[column] = x.d < 0 ? 256 * x.q[column] + more[column] : x.q[column];
            int32_t sums[2][PANEL];
            for (int half = 0; half < 2; ++half) {
                const int minus = half ? x.minus_sum - x.minus_half : x.minus_half;
                for (int lane = 0; lane < PANEL; ++lane) sums[half][lane] = ZERO * minus;
                for (int column = 16 * half; column < 16 * half + 16; ++column)
                    for (int lane = 0; lane < PANEL; ++lane) sums[half][lane] += codes[column][lane] * q[column];
            }
            for (int lane = 0; lane < PANEL; ++lane) {
                float sum;
                if constexpr (C::SCALES == K_SIXTEENTHS)
                    sum = static_cast<float>(sums[0][lane]) * scale[0][lane] + static_cast<float>(sums[1][lane]) * scale[1][lane];
                else
                    sum = static_cast<float>(sums[0][lane] + sums[1][lane]) * scale[0][lane];
                totals[row][lane] += sum * __builtin_fabsf(x.d) + minimum[lane] * x.sum;
            }
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int lane = 0; lane < width; ++lane)
            out[row * out_stride + lane] = bias ? totals[row][lane] + bias[lane] : totals[row][lane];
}

struct DenseF32 {
    static constexpr int BYTES = 4;
    static inline float at(const uint8_t* p) {
        float value;
        __builtin_memcpy(&value, p, 4);
        return value;
    }
};
struct DenseF16 {
    static constexpr int BYTES = 2;
    static inline float at(const uint8_t* p) { return half_at(p); }
};
struct DenseBF16 {
    static constexpr int BYTES = 2;
    static inline float at(const uint8_t* p) { return brain_at(p); }
};

template <class D, int ROWS>
static void product_dense(const uint8_t* panel, int64_t columns, const float* x, int64_t stride, float* out,
                          int64_t out_stride, int width, const float* bias) {
    float totals[ROWS][PANEL] = {};
    for (int64_t k = 0; k < columns; ++k) {
        float weights[PANEL];
        for (int lane = 0; lane < PANEL; ++lane) weights[lane] = D::at(panel + (k * PANEL + lane) * D::BYTES);
        for (int row = 0; row < ROWS; ++row)
            for (int lane = 0; lane < PANEL; ++lane) totals[row][lane] += weights[lane] * x[k * stride + row];
    }
    for (int row = 0; row < ROWS; ++row)
        for (int lane = 0; lane < width; ++lane)
            out[row * out_stride + lane] = bias ? totals[row][lane] + bias[lane] : totals[row][lane];
}

// The largest magnitude of 32 values; not finite if one of them is not.
static inline float largest(const float* x) {
    float top = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float size = __builtin_fabsf(x[i]);
        if (!(size <= LARGEST)) return size;
        top = size > top ? size : top;
    }
    return top;
}

// Rounds 16 values; returns the sum of their codes. `fine` gets the further bits, if there is one.
static inline int round_half(const float* x, float inverse, int8_t* q, int8_t* fine) {
    int sum = 0;
    for (int i = 0; i < 16; ++i) {
        const float scaled = x[i] * inverse;
        const int coarse = static_cast<int>(__builtin_lrintf(scaled));
        q[i] = static_cast<int8_t>(coarse);
        if (!fine) {
            sum += coarse;
            continue;
        }
        const int bits = static_cast<int>(__builtin_lrintf((scaled - static_cast<float>(coarse)) * 256.0f));
        fine[i] = static_cast<int8_t>(bits > 127 ? 127 : bits < -127 ? -127 : bits);
        sum += 256 * coarse + fine[i];
    }
    return sum;
}

}  // namespace TM_NS
