// Memory of a thread's own, which grows and is freed when the thread ends.
#include "thread_scratch.h"

#include <cstdlib>

namespace mill {
namespace {

struct Owned {
    float* memory = nullptr;
    size_t floats = 0;

    ~Owned() { free(memory); }
};

thread_local Owned owned;

}  // namespace

float* thread_scratch(size_t floats) {
    if (floats > owned.floats) {
        free(owned.memory);
        const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
        owned.memory = static_cast<float*>(aligned_alloc(4096, bytes));
        if (!owned.memory) abort();  // out of memory with no way to say so
        owned.floats = bytes / sizeof(float);
    }
    return owned.memory;
}

}  // namespace mill
