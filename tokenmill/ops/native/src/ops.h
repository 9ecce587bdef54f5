// The table of ops: every kernel source, compiled once per CPU level, lists what it offers as plain constant data.
//
// A kernel source is compiled several times with different flags and -DTM_LEVEL=n. Everything in it lives in namespace
// TM_NS (another one per level). kernels/name.cpp defines `extern const mill::OpEntry TM_OPS(name)[] = {..., {}};` in
// namespace mill; the build lists what it compiled. It must not use inline functions or templates of the standard
// library that end up as symbols: the linker would keep one copy for all levels, perhaps one that this CPU cannot
// execute. For the same reason nothing in it may run before the level was chosen (no static constructors).
#pragma once

#include "team.h"

#ifndef TM_LEVEL
#define TM_LEVEL 0
#endif
// The levels, as the preprocessor and as the compiler know them. Those of the other kind of CPU are above all that are compiled.
#if defined(__aarch64__)
#define TM_NEON 1
#define TM_DOTPROD 2
#define TM_AVX2 100
#define TM_AVX_VNNI 100
#define TM_AVX512 100
#define TM_VNNI 100
#define TM_AMX 100
#else
#define TM_AVX2 1
#define TM_AVX_VNNI 2
#define TM_AVX512 3
#define TM_VNNI 4
#define TM_AMX 5
#define TM_NEON 100
#define TM_DOTPROD 100
#endif

#define TM_JOIN2(a, b) a##b
#define TM_JOIN(a, b) TM_JOIN2(a, b)
#define TM_NS TM_JOIN(tm_level, TM_LEVEL)
#define TM_OPS(source) TM_JOIN(TM_JOIN(ops_, source), TM_JOIN(_, TM_LEVEL))

namespace mill {

// A CPU need not have all levels below its best one: some have AVX-512 and no AVX-VNNI.
#if defined(__aarch64__)
enum Level { BASE, NEON = TM_NEON, DOTPROD = TM_DOTPROD, LEVELS };
#else
enum Level { BASE, AVX2 = TM_AVX2, AVX_VNNI = TM_AVX_VNNI, AVX512 = TM_AVX512, VNNI = TM_VNNI, AMX = TM_AMX, LEVELS };
#endif

// Kinds 1-63 belong to the matrix sources, 64-127 to attention and elementwise sources.
constexpr uint32_t MAX_KINDS = 128;

struct OpEntry {
    uint32_t kind;                            // 0 ends a list
    uint32_t args_bytes;                      // size of the args struct, which is plain data
    void (*run)(const void* args, Team&);     // called by all members at once
    size_t (*scratch)(const void* args, int64_t rows);  // bytes of shared scratch for this call, or nullptr
};

// The entry of the chosen level, or of the best one below it that has this kind; nullptr if there is none.
const OpEntry* find_op(uint32_t kind);

// Runs `body` on all threads of the pool at once, with `scratch` bytes of shared scratch; one region at a time.
// Everything that was written in the region is visible to the caller when it returns. `rows`: see Team. False: void,
// since somebody it depends on is gone.
bool run_region(void (*body)(void* context, Team&), void* context, size_t scratch, int64_t rows);

// While set, tm_run only hands ops to the recorder, and executes nothing. (Which level's entry: at the time of recording.)
struct Recorder {
    virtual void append(const OpEntry& op, const void* args) = 0;  // args live only until this returns

protected:
    ~Recorder() = default;
};
void set_recorder(Recorder* recorder);  // of the calling thread; nullptr: none

}  // namespace mill
