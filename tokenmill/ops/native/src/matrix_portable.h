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

// The float that the small scales of a row are multiplied with, or its first scale.
template <class C>
static inline float d_of(const uint8_t* scales, int row) {
    if constexpr (C::FLOAT_D) {
        float d;
        __builtin_memcpy(&d, scales + 4 * row, 4);
        return d;
    }
    return half_at(scales + 2 * row);
}

// scale[half of the group][row], and minimum[row] of group g of a panel.
template <class C>
static inline void group_scales(const uint8_t* panel, int64_t g, float scale[2][PANEL], float minimum[PANEL]) {
    const uint8_t* at = panel + C::scales_at(g);
    const uint8_t* small = at + SMALL_AT;
    const int64_t in = g % C::CHUNK;
    for (int row = 0; row < PANEL; ++row) {
        minimum[row] = 0;
        const float d = d_of<C>(at, row);
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

// Adds what a group gives with one input block to totals.
template <class C>
static inline void add_group(const uint8_t* panel, int64_t g, const InputBlock& x, float totals[PANEL]) {
    constexpr int ZERO = C::HAS_ZERO ? 1 << C::ZERO_SHIFT : 0;
    uint8_t codes[GROUP][PANEL];
    float scale[2][PANEL], minimum[PANEL];
    unpack<C::BITS>(panel + C::codes_at(g), codes);
    group_scales<C>(panel, g, scale, minimum);
    int32_t sums[2][PANEL];
    for (int half = 0; half < 2; ++half) {
        const int minus = half ? x.minus_sum - x.minus_half : x.minus_half;
        for (int lane = 0; lane < PANEL; ++lane) sums[half][lane] = ZERO * minus;
        for (int column = 16 * half; column < 16 * half + 16; ++column)
            for (int lane = 0; lane < PANEL; ++lane) sums[half][lane] += codes[column][lane] * x.q[column];
    }
    for (int lane = 0; lane < PANEL; ++lane) {
        float sum;
        if constexpr (C::SCALES == K_SIXTEENTHS)
            sum = static_cast<float>(sums[0][lane]) * scale[0][lane] + static_cast<float>(sums[1][lane]) * scale[1][lane];
        else
            sum = static_cast<float>(sums[0][lane] + sums[1][lane]) * scale[0][lane];
        totals[lane] += sum * x.d;
        totals[lane] += minimum[lane] * x.sum;
    }
}

// Adds the weights of one column times an input of each row, without their minimums.
template <class C, int ROWS>
static inline void add_outlier(const uint8_t* panel, const Outlier& one, int first, float totals[ROWS][PANEL]) {
    constexpr int ZERO = C::HAS_ZERO ? 1 << C::ZERO_SHIFT : 0;
    uint8_t codes[GROUP][PANEL];
    float scale[2][PANEL], minimum[PANEL];
    unpack<C::BITS>(panel + C::codes_at(one.group), codes);
    group_scales<C>(panel, one.group, scale, minimum);
    for (int row = 0; row < ROWS; ++row)
        for (int lane = 0; lane < PANEL; ++lane) {
            const float weight = static_cast<float>(codes[one.column][lane] - ZERO) * scale[one.column / 16][lane];
            totals[row][lane] += weight * one.x[first + row];
        }
}

template <class C, int ROWS>
static void product(const uint8_t* panel, int64_t columns, const Rows& rows, float* out, int64_t out_stride, int width,
                    const float* bias) {
    float totals[ROWS][PANEL] = {};
    for (int64_t g = 0; g < columns / GROUP; ++g)
        for (int row = 0; row < ROWS; ++row)
            add_group<C>(panel, g, rows.blocks[g * rows.stride + row], totals[row]);
    for (int64_t i = 0; i < rows.taken[0]; ++i) add_outlier<C, ROWS>(panel, rows.outliers[i], rows.first, totals);
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

constexpr int DENSE_ROWS = MAX_ROWS;
constexpr int dense_panels(int) { return 1; }  // at once

// A dense panel times ROWS rows: x is [columns][stride] floats, one column of the tile after the other.
template <class D, int ROWS, int PANELS>
static void product_dense(const uint8_t* panel, int64_t, int64_t columns, const float* x, int64_t stride, float* out,
                          int64_t out_stride, int64_t width, const float* bias) {
    static_assert(PANELS == 1, "of several, only the first would be multiplied");
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

// The 32 inputs of a block.
struct Values {
    float x[GROUP];

    explicit inline Values(const float* from) { __builtin_memcpy(x, from, sizeof x); }

    // The largest magnitude; not finite if one of them is not.
    inline float largest() const {
        float top = 0;
        for (int i = 0; i < GROUP; ++i) {
            const float size = __builtin_fabsf(x[i]);
            if (!(size <= LARGEST)) return size;
            top = size > top ? size : top;
        }
        return top;
    }

    // Makes the first value of this magnitude zero; returns where it is.
    inline int drop(float size) {
        int place = 0;
        while (__builtin_fabsf(x[place]) != size) ++place;
        x[place] = 0;
        return place;
    }

    // Rounds a half; returns the sum of its codes.
    inline int round(int half, float inverse, int8_t* q) const {
        int sum = 0;
        for (int i = 0; i < 16; ++i) {
            const int code = static_cast<int>(__builtin_lrintf(x[16 * half + i] * inverse));
            q[i] = static_cast<int8_t>(code);
            sum += code;
        }
        return sum;
    }
};

}  // namespace TM_NS
