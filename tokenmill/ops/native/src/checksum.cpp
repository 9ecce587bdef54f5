// CRC32C (Castagnoli) of bytes: three streams of the CPU's own instruction side by side, or a table where there is none.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

constexpr uint32_t POLYNOMIAL = 0x82f63b78;  // reflected
constexpr size_t LANE = 4096;                // bytes of one of the three streams

struct Tables {
    uint32_t bytes[256];     // what a byte does to the register
    uint32_t skip[4][256];   // what LANE zero bytes do to each byte of the register
    Tables() {
        for (uint32_t value = 0; value < 256; ++value) {
            uint32_t crc = value;
            for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
            bytes[value] = crc;
        }
        uint32_t moved[32];  // of each bit of the register: the register is linear in them
        for (int bit = 0; bit < 32; ++bit) {
            uint32_t crc = 1u << bit;
            for (size_t zeros = 0; zeros < LANE; ++zeros) crc = crc >> 8 ^ bytes[crc & 255];
            moved[bit] = crc;
        }
        for (int part = 0; part < 4; ++part)
            for (uint32_t value = 0; value < 256; ++value) {
                uint32_t crc = 0;
                for (int bit = 0; bit < 8; ++bit)
                    if (value >> bit & 1) crc ^= moved[8 * part + bit];
                skip[part][value] = crc;
            }
    }
    uint32_t behind_lane(uint32_t crc) const {
        return skip[0][crc & 255] ^ skip[1][crc >> 8 & 255] ^ skip[2][crc >> 16 & 255] ^ skip[3][crc >> 24];
    }
};
const Tables tables;

uint32_t by_table(uint32_t crc, const unsigned char* data, size_t size) {
    for (; size; --size) crc = crc >> 8 ^ tables.bytes[(crc ^ *data++) & 255];
    return crc;
}

#if defined(__x86_64__)
#define TM_CRC_TARGET __attribute__((target("sse4.2")))
TM_CRC_TARGET inline uint64_t word(uint64_t crc, uint64_t value) { return _mm_crc32_u64(crc, value); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__)
#define TM_CRC_TARGET
// Written out, so that the rest of the file is compiled for CPUs that lack it.
inline uint64_t word(uint64_t crc, uint64_t value) {
    uint32_t low = static_cast<uint32_t>(crc);
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(low) : "r"(value));
    return low;
}
bool has_instruction() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 7 & 1;  // HWCAP_CRC32
#elif defined(__APPLE__) || defined(__ARM_FEATURE_CRC32)
    return true;
#else
    return false;
#endif
}
#endif

#if defined(TM_CRC_TARGET)
TM_CRC_TARGET inline uint64_t load(const unsigned char* data) {
    uint64_t value;
    std::memcpy(&value, data, 8);
    return value;
}

// An instruction takes three cycles and can be started every cycle, so three streams take the time of one.
TM_CRC_TARGET uint32_t by_instruction(uint32_t crc, const unsigned char* data, size_t size) {
    for (; size >= 3 * LANE; data += 3 * LANE, size -= 3 * LANE) {
        uint64_t first = crc, second = 0, third = 0;
        for (size_t at = 0; at < LANE; at += 8) {
            first = word(first, load(data + at));
            second = word(second, load(data + LANE + at));
            third = word(third, load(data + 2 * LANE + at));
        }
        crc = tables.behind_lane(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
        crc = tables.behind_lane(crc) ^ static_cast<uint32_t>(third);
    }
    for (; size >= 8; data += 8, size -= 8) crc = static_cast<uint32_t>(word(crc, load(data)));
    return by_table(crc, data, size);
}
#endif

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// plain: without the CPU's instruction, to compare with it.
uint32_t tm_crc32c(const void* data, size_t size, int plain) {
    const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(TM_CRC_TARGET)
    static const bool fast = has_instruction();
    if (fast && !plain) return ~by_instruction(~0u, bytes, size);
#endif
    (void)plain;
    return ~by_table(~0u, bytes, size);
}
}
#pragma GCC visibility pop
