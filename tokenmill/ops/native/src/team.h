// Team: what an op sees of the threads that run it together.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mill {

// Waiting: spin for a short while, since the others are usually microseconds away, then sleep in the kernel.
// The value is compared before sleeping, so a change between the last look and the sleep is never missed.
struct Signal {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    uint32_t wait_while(uint32_t seen, uint32_t spins);  // returns the new value
    void set(uint32_t to);                               // publishes and wakes whoever sleeps
};

// What all members of one parallel region share.
struct Shared {
    alignas(64) std::atomic<uint32_t> arrived{0};
    alignas(64) Signal passed;                       // generation of the barrier
    alignas(64) std::atomic<int64_t> counters[2]{};  // two, so that one can be reset while the other is in use
    char* scratch = nullptr;                         // room that the op asked for (OpEntry::scratch)
    std::atomic<uint64_t> lost{0};                   // phase in which another process was found to be gone, plus one
};

// One thread's view. Every member calls barrier() equally often, and next() only between two barriers.
struct Team {
    int index = 0;
    int count = 1;
    Shared* shared = nullptr;
    int64_t rows = 0;     // of the step, where a recorded step is run for as many rows as there are today
    uint64_t waited = 0;  // ticks that member 0 waited at barriers
    uint32_t phase = 0;   // barriers passed so far, the same number in every member when it leaves one

    void barrier();

    // What this region computes is void: somebody it depends on is gone. All members still pass the same barriers; they
    // agree on stopped() right behind one, since whoever is a barrier ahead speaks of a later phase.
    void lose() {
        uint64_t nobody = 0;
        shared->lost.compare_exchange_strong(nobody, uint64_t(phase) + 1, std::memory_order_relaxed);
    }
    bool stopped() const {
        const uint64_t lost = shared->lost.load(std::memory_order_relaxed);
        return lost && int32_t(phase - uint32_t(lost - 1)) > 0;
    }

    // The next piece of work of the present phase: 0, 1, 2, ... each given to one member only.
    int64_t next() { return shared->counters[phase & 1].fetch_add(1, std::memory_order_relaxed); }

    // The contiguous share [begin, end) of `items` that belongs to this member.
    void share(int64_t items, int64_t& begin, int64_t& end) const {
        begin = items * index / count;
        end = items * (index + 1) / count;
    }

    char* scratch() const { return shared->scratch; }  // shared by all members
};

// A count of rows in an args struct: itself, or where it is negative, that many times the rows of the step.
inline int64_t rows_of(int64_t count, int64_t rows) { return count < 0 ? -count * rows : count; }

}  // namespace mill
