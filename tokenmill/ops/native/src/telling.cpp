// What steps and whoever brings their weights have to agree on: numbers of routing.h, and the order of what is told.
#include <atomic>

#include "routing.h"

#pragma GCC visibility push(default)
extern "C" {

// What the caller wrote before is seen by others before it reads anything behind this.
void tm_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

int64_t tm_told_numbers() { return mill::TOLD_NUMBERS; }

// Of all experts: who chooses so many is taken to choose all.
double tm_most() { return double(mill::MOST_OF_THEM) / mill::MOST_PARTS; }
}
#pragma GCC visibility pop
