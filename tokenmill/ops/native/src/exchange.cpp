// Exchange between processes: waiting for words in common memory, and the rings through which one rank sends to another.
#include "exchange.h"

#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mill {
namespace {

constexpr long LOOK_AGAIN = 5000000;  // nanoseconds of sleep after which one sees by oneself whether the group has ended

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// The memory is that of several processes, so these are not the private ones of the pool.
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec most{0, LOOK_AGAIN};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &most, nullptr, 0);
#else
    if (word.load(std::memory_order_acquire) == seen) sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

bool reached(uint32_t value, uint32_t least) { return int32_t(value - least) >= 0; }

// How long to look before sleeping: longer as long as that is enough, and hardly where others have the cores. There
// whoever looks takes the time of those that it waits for. Between ranks that run it is a microsecond; a sleep costs many.
struct Patience {
    static constexpr int64_t LEAST = 100, MOST = 4000;  // looks, of some tens of nanoseconds
    const Group& group;
    int64_t looks;

    explicit Patience(const Group& group) : group(group), looks(__atomic_load_n(&group.looks, __ATOMIC_RELAXED)) {}

    void was_enough(bool enough) {
        const int64_t next = enough ? looks + looks / 16 + 1 : looks / 2;
        __atomic_store_n(&group.looks, next < LEAST ? LEAST : next > MOST ? MOST : next, __ATOMIC_RELAXED);
    }
};

// Returns when the word is at least that, or false when the group has ended.
bool await(const Group& group, Word& word, uint32_t least) {
    if (reached(word.value.load(std::memory_order_acquire), least)) return true;
    Patience patience(group);
    for (int64_t look = 0; look < patience.looks; ++look) {
        if (reached(word.value.load(std::memory_order_acquire), least)) {
            patience.was_enough(true);
            return true;
        }
        if (group.has_ended()) return false;
        relax();
    }
    patience.was_enough(false);
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool there;
    for (;;) {
        const uint32_t now = word.value.load(std::memory_order_seq_cst);
        there = reached(now, least);
        if (there || group.has_ended()) break;
        sleep_while(word.value, now);
    }
    word.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return there;
}

void publish(Word& word, uint32_t value) {
    word.value.store(value, std::memory_order_seq_cst);
    if (word.sleepers.load(std::memory_order_seq_cst)) wake_all(word.value);
}

struct Ring {
    Word &written, &read;
    char* data;
    uint32_t lines;  // a power of two, so that counts of lines may begin again

    Ring(const Group& g, int64_t source, int64_t to)
        : written(g.rings[2 * (source * g.size + to)]), read(g.rings[2 * (source * g.size + to) + 1]),
          data(g.bytes_of_rings + (source * g.size + to) * g.ring_bytes), lines(uint32_t(g.ring_bytes / LINE)) {}
};

// How much of `size` bytes goes in one piece that begins at line `at`, with `free` lines of room.
int64_t piece(const Ring& ring, uint32_t at, uint32_t free, int64_t size) {
    const uint32_t to_the_end = ring.lines - at % ring.lines;
    const int64_t most = int64_t(free < to_the_end ? free : to_the_end) * LINE;
    return size < most ? size : most;
}

uint32_t lines_of(int64_t size) { return uint32_t((size + LINE - 1) / LINE); }

}  // namespace

bool Group::has_ended() const { return ended->load(std::memory_order_acquire) != 0; }

bool Group::meet(const Team& team, uint32_t round) const {
    if (has_ended()) return false;
    if (team.index == 0) publish(filled[rank], round + 1);
    for (int64_t step = 1; step < size; ++step)
        if (!await(*this, filled[(rank + step) % size], round + 1)) return false;
    return true;
}

bool Group::send(int64_t to, const char* data, int64_t size) {
    const Ring ring(*this, rank, to);
    count(kSend, size);
    if (has_ended()) return false;
    uint32_t written = ring.written.value.load(std::memory_order_relaxed);
    while (size > 0) {
        if (!await(*this, ring.read, written - ring.lines + 1)) return false;
        const uint32_t used = written - ring.read.value.load(std::memory_order_acquire);
        const int64_t now = piece(ring, written, ring.lines - used, size);
        std::memcpy(ring.data + int64_t(written % ring.lines) * LINE, data, size_t(now));
        written += lines_of(now);
        publish(ring.written, written);
        data += now;
        size -= now;
    }
    return true;
}

bool Group::receive(int64_t source, char* data, int64_t size) {
    const Ring ring(*this, source, rank);
    count(kReceive, size);
    if (has_ended()) return false;
    uint32_t read = ring.read.value.load(std::memory_order_relaxed);
    while (size > 0) {
        if (!await(*this, ring.written, read + 1)) return false;
        const uint32_t there = ring.written.value.load(std::memory_order_acquire) - read;
        const int64_t now = piece(ring, read, there, size);
        std::memcpy(data, ring.data + int64_t(read % ring.lines) * LINE, size_t(now));
        read += lines_of(now);
        publish(ring.read, read);
        data += now;
        size -= now;
    }
    return true;
}

}  // namespace mill

#pragma GCC visibility push(default)
extern "C" {

// So that the other side can check that both mean the same struct.
uint32_t tm_group_bytes() { return sizeof(mill::Group); }

// 0, or 2 where the group has ended.
int tm_send(mill::Group* group, int64_t to, const void* data, int64_t size) {
    return group->send(to, static_cast<const char*>(data), size) ? 0 : 2;
}

int tm_receive(mill::Group* group, int64_t source, void* data, int64_t size) {
    return group->receive(source, static_cast<char*>(data), size) ? 0 : 2;
}
}
#pragma GCC visibility pop
