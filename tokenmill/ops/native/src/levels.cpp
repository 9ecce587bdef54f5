// Which CPU level is used, and the ops that it offers.
#include "ops.h"

// TM_KERNELS is given by the build: TM_KERNEL(matrix) TM_KERNEL(attention) ..., one per file in kernels/.
#define TM_KERNEL(name) extern const OpEntry ops_##name##_0[];
#define TM_KERNEL_X86(name) extern const OpEntry ops_##name##_1[], ops_##name##_2[], ops_##name##_3[];
namespace mill {
TM_KERNELS
#undef TM_KERNEL
#if defined(__x86_64__)
#define TM_KERNEL(name) TM_KERNEL_X86(name)
TM_KERNELS
#undef TM_KERNEL
#endif

namespace {

struct Source {
    const OpEntry* levels[LEVELS];
};

#if defined(__x86_64__)
#define TM_KERNEL(name) {{ops_##name##_0, ops_##name##_1, ops_##name##_2, ops_##name##_3}},
#else
#define TM_KERNEL(name) {{ops_##name##_0, nullptr, nullptr, nullptr}},
#endif
const Source SOURCES[] = {TM_KERNELS};

int best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return AVX2;
    return __builtin_cpu_supports("avx512vnni") ? VNNI : AVX512;
#else
    return BASE;
#endif
}

struct Table {
    int level;
    const OpEntry* ops[MAX_KINDS];

    explicit Table(int level) : level(level), ops{} {
        for (int l = 0; l <= level; ++l)
            for (const Source& source : SOURCES)
                for (const OpEntry* op = source.levels[l]; op && op->kind; ++op)
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

int tm_level() { return mill::table().level; }

// Use another level than the best one; returns the one in use, which is never above what the CPU has. Not while ops run.
int tm_set_level(int level) {
    const int best = mill::best_level();
    mill::table() = mill::Table(level < 0 ? 0 : level > best ? best : level);
    return mill::table().level;
}

// Size of an op's args struct, so that the other side can check that both mean the same; 0: no such op.
uint32_t tm_args_bytes(uint32_t kind) {
    const mill::OpEntry* op = mill::find_op(kind);
    return op ? op->args_bytes : 0;
}
}
#pragma GCC visibility pop
