// Memory for weights and the KV cache: large pages where the system has them, so that few addresses need translation.
#include <sys/mman.h>

#include <cstddef>

namespace {
constexpr size_t PAGE = 2u << 20;
}

#pragma GCC visibility push(default)
extern "C" {

// Zeroed memory, aligned to a large page; nullptr if there is none. It is taken from the system as it is first touched.
void* tm_alloc(size_t bytes) {
    const size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    char* base = static_cast<char*>(mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base == MAP_FAILED) return nullptr;
    const size_t skip = (PAGE - reinterpret_cast<size_t>(base) % PAGE) % PAGE;
    if (skip) munmap(base, skip);
    if (PAGE - skip) munmap(base + skip + whole, PAGE - skip);
#if defined(MADV_HUGEPAGE)
    madvise(base + skip, whole, MADV_HUGEPAGE);
#endif
    return base + skip;
}

// Takes the first bytes from the system now, a large page at a time, without changing what they hold.
void tm_populate(void* memory, size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
    char* const first = static_cast<char*>(memory);
    for (size_t at = 0; at < bytes; at += PAGE)
        if (madvise(first + at, bytes - at < PAGE ? bytes - at : PAGE, MADV_POPULATE_WRITE)) return;  // an older system
#else
    (void)memory, (void)bytes;
#endif
}

void tm_free(void* memory, size_t bytes) { munmap(memory, (bytes + PAGE - 1) / PAGE * PAGE); }
}
#pragma GCC visibility pop
