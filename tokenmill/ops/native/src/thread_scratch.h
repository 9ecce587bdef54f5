// Memory of a thread's own for the inside of one op.
#pragma once

#include <cstddef>

namespace mill {

// At least this much, aligned to a cache line; valid until the same thread asks again.
float* thread_scratch(size_t floats);

}  // namespace mill
