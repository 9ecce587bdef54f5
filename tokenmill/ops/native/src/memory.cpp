// Memory for weights: large pages where the system has them, since weights are read from end to end again and again.
#include <cstddef>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {
constexpr size_t PAGE = 2u << 20;
}

#pragma GCC visibility push(default)
extern "C" {

// Zeroed memory aligned to a cache line or better; nullptr if there is none.
void* tm_alloc(size_t bytes) {
#if defined(__linux__)
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    char* base = static_cast<char*>(mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base == MAP_FAILED) return nullptr;
    const size_t skip = (PAGE - reinterpret_cast<size_t>(base) % PAGE) % PAGE;
    if (skip) munmap(base, skip);
    if (PAGE - skip) munmap(base + skip + whole, PAGE - skip);
    madvise(base + skip, whole, MADV_HUGEPAGE);
    return base + skip;
#else
    void* memory = nullptr;
    return posix_memalign(&memory, 64, bytes) ? nullptr : memory;
#endif
}

void tm_free(void* memory, size_t bytes) {
#if defined(__linux__)
    munmap(memory, (bytes + PAGE - 1) / PAGE * PAGE);
#else
    (void)bytes;
    free(memory);
#endif
}
}
#pragma GCC visibility pop
