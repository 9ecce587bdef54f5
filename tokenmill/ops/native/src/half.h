// 16-bit floats read in plain C++.
#pragma once

#include <cstdint>

namespace mill {

static inline float bits_to_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

static inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) {
        const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2 ** -24
        return sign ? -size : size;
    }
    return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t read16(const uint8_t* at) { return static_cast<uint16_t>(at[0] | at[1] << 8); }
static inline float half_at(const uint8_t* at) { return half_to_float(read16(at)); }
static inline float brain_at(const uint8_t* at) { return bits_to_float(static_cast<uint32_t>(read16(at)) << 16); }

}  // namespace mill
