// Which CPU levels there are, which one is used, and the ops that it offers.
#include "ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// TM_COMPILED is given by the build: TM_SOURCE(matrix, 0) TM_SOURCE(matrix, 1) ..., one per object made from a kernel.
namespace mill {
#define TM_SOURCE(name, level) extern const OpEntry ops_##name##_##level[];
TM_COMPILED
#undef TM_SOURCE

namespace {

struct Source {
    int level;
    const OpEntry* ops;
};

#define TM_SOURCE(name, level) {level, ops_##name##_##level},
const Source SOURCES[] = {TM_COMPILED};
#undef TM_SOURCE

// A compiler may have been too old for some.
bool compiled(int level) {
    for (const Source& source : SOURCES)
        if (source.level == level) return true;
    return false;
}

#if defined(__x86_64__)
struct Leaf {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;

    Leaf(uint32_t leaf, uint32_t part) { __get_cpuid_count(leaf, part, &eax, &ebx, &ecx, &edx); }
};

[[maybe_unused]] bool has_avx_vnni() { return Leaf(7, 0).eax >= 1 && (Leaf(7, 1).eax >> 4 & 1); }

// The CPU has tiles, the system saves them, and gave this process leave to use them.
[[maybe_unused]] bool has_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr uint32_t TILES_AND_BYTES = 3u << 24, SYSTEM_SAVES = 1u << 27, BOTH_STATES = 3u << 17;
    if ((Leaf(7, 0).edx & TILES_AND_BYTES) != TILES_AND_BYTES || !(Leaf(1, 0).ecx & SYSTEM_SAVES)) return false;
    uint32_t saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & BOTH_STATES) != BOTH_STATES) return false;
    constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM; for all threads of the process
    static const bool allowed = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return allowed;
#else
    return false;
#endif
}
#elif defined(__aarch64__)
// Signed products of bytes, four of them added in 32 bits; and the atomic instructions of ARMv8.1, which the compiler may use
// where it may use those.
bool has_dotprod() {
#if defined(__APPLE__)
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &there, &size, nullptr, 0) == 0 && there;
#elif defined(__linux__)
    constexpr unsigned long DOT_PRODUCTS = 1ul << 20, ATOMICS = 1ul << 8;  // HWCAP_ASIMDDP, HWCAP_ATOMICS
    return (getauxval(AT_HWCAP) & (DOT_PRODUCTS | ATOMICS)) == (DOT_PRODUCTS | ATOMICS);
#else
    return false;
#endif
}
#endif

bool has_level(int level) {
    if (level < 0 || level >= LEVELS || !compiled(level)) return false;
    if (level == BASE) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    switch (level) {
        case AVX2: return avx2;
        case AVX512: return avx512;
        case VNNI: return vnni;
#if defined(TM_STAND_IN)  // other instructions take the place of those that only newer CPUs have
        default: return vnni;
#else
        case AVX_VNNI: return avx2 && has_avx_vnni();
        default: return vnni && has_tiles();
#endif
    }
#elif defined(__aarch64__)
    return level == NEON || has_dotprod();  // every such CPU has NEON
#else
    return false;
#endif
}

// The best level up to this one.
int level_below(int level) {
    while (!has_level(level)) --level;
    return level;
}

int best_level() { return level_below(LEVELS - 1); }

struct Table {
    int level;
    const OpEntry* ops[MAX_KINDS];

    explicit Table(int level) : level(level), ops{} {
        for (int l = 0; l <= level; ++l)
            for (const Source& source : SOURCES)
                for (const OpEntry* op = source.ops; source.level == l && has_level(l) && op->kind; ++op)
                    if (op->kind < MAX_KINDS) ops[op->kind] = op;
    }
};

Table& table() {
    static Table one(best_level());
    return one;
}

}  // namespace

const OpEntry* find_op(uint32_t kind) { return kind < MAX_KINDS ? table().ops[kind] : nullptr; }

}  // namespace mill

#pragma GCC visibility push(default)
extern "C" {

int tm_best_level() { return mill::best_level(); }

// Whether this CPU and this library have a level; 0 or 1.
int tm_has_level(int level) { return mill::has_level(level); }

int tm_level() { return mill::table().level; }

// Use another level than the best one; returns the one in use, the best up to this that there is. Not while ops run.
int tm_set_level(int level) {
    mill::table() = mill::Table(level <= 0 ? 0 : mill::level_below(level < mill::LEVELS ? level : mill::LEVELS - 1));
    return mill::table().level;
}

// Size of an op's args struct, so that the other side can check that both mean the same; 0: no such op.
uint32_t tm_args_bytes(uint32_t kind) {
    const mill::OpEntry* op = mill::find_op(kind);
    return op ? op->args_bytes : 0;
}
}
#pragma GCC visibility pop
