// The pool: threads that live as long as the process and run parallel regions together with the caller.
#include <pthread.h>

#include <cstdlib>
#include <ctime>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops.h"

namespace mill {
namespace {

constexpr uint32_t SPINS = 2000;       // of about 40 ns: what usually passes between the ops of one step
constexpr uint32_t STOP = 0xffffffff;  // a region number that never comes
constexpr int MAX_THREADS = 256;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}
#else
// Where all who sleep wait, whatever their word: who is woken looks at it and waits again.
struct ParkingLot {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
};
ParkingLot* lot = new ParkingLot;  // after a fork another one: the parent's threads may hold the old one

void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
    pthread_mutex_lock(&lot->mutex);
    if (word.load(std::memory_order_seq_cst) == seen) pthread_cond_wait(&lot->woken, &lot->mutex);
    pthread_mutex_unlock(&lot->mutex);
}

void wake_all(std::atomic<uint32_t>&) {
    pthread_mutex_lock(&lot->mutex);  // so that nobody is between its look at the word and its sleep
    pthread_cond_broadcast(&lot->woken);
    pthread_mutex_unlock(&lot->mutex);
}
#endif

}  // namespace

// Some steadily growing count of time; only its ratios are used.
static inline uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
#endif
}

uint32_t Signal::wait_while(uint32_t seen, uint32_t spins) {
    uint32_t now;
    for (uint32_t spin = 0; spin < spins; ++spin) {
        if ((now = value.load(std::memory_order_acquire)) != seen) return now;
        relax();
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while ((now = value.load(std::memory_order_seq_cst)) == seen) sleep_while(value, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    return now;
}

void Signal::set(uint32_t to) {
    value.store(to, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst)) wake_all(value);
}

void Team::barrier() {
    const uint32_t generation = phase++;
    if (count == 1) {
        shared->counters[phase & 1].store(0, std::memory_order_relaxed);
        return;
    }
    // The counter of the phase to come was last used two phases ago: everybody has left that one.
    if (shared->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(count)) {
        shared->arrived.store(0, std::memory_order_relaxed);
        shared->counters[phase & 1].store(0, std::memory_order_relaxed);
        shared->passed.set(generation + 1);
    } else {
        const uint64_t began = index == 0 ? ticks() : 0;
        shared->passed.wait_while(generation, SPINS);
        if (index == 0) waited += ticks() - began;
    }
}

namespace {

// Whether the other threads are worth waiting for. Where other programs have the cores, a thread that is not running
// holds up everybody at every barrier, and the caller alone is faster. Bits do not depend on the number of threads.
struct Crowd {
    static constexpr uint64_t WINDOW = 1u << 26;  // ticks of work that are judged together: tens of milliseconds
    static constexpr uint64_t LONGEST = 64;       // windows alone before the next try

    uint64_t worked = 0, waited = 0;  // by the caller, in this window
    uint64_t alone = 0;               // ticks of work still to be done alone
    uint64_t next = 1;                // windows alone after the next bad one

    void note(uint64_t work, uint64_t wait, bool together) {
        if (!together) {
            alone -= work < alone ? work : alone;
            return;
        }
        worked += work;
        waited += wait;
        if (worked < WINDOW) return;
        if (2 * waited > worked) {
            alone = next * WINDOW;
            next = 2 * next < LONGEST ? 2 * next : LONGEST;
        } else {
            next = 1;
        }
        worked = waited = 0;
    }
};

struct Pool;

struct Worker {
    Pool* pool;
    int index;
    pthread_t thread;
};

struct Pool {
    std::mutex one_region;  // regions of different callers follow each other
    int wanted = 1;
    std::vector<Worker*> workers;  // members 1, 2, ...; the caller is member 0
    Shared shared;
    Signal region;  // number of the region that may start
    void (*body)(void*, Team&) = nullptr;
    void* context = nullptr;
    int64_t rows = 0;
    uint32_t first_phase = 0;
    size_t scratch_bytes = 0;
    Crowd crowd;
};

Pool* pool = nullptr;

// Returns the ticks that were waited for others.
uint64_t take_part(Pool& p, int index, int count) {
    Team team;
    team.index = index;
    team.count = count;
    team.shared = &p.shared;
    team.phase = p.first_phase;
    team.rows = p.rows;
    p.body(p.context, team);
    team.barrier();  // the end of the region
    return team.waited;
}

void* work(void* argument) {
    Worker& me = *static_cast<Worker*>(argument);
    uint32_t seen = 0;
    for (;;) {
        seen = me.pool->region.wait_while(seen, SPINS);
        if (seen == STOP) return nullptr;
        take_part(*me.pool, me.index, me.pool->wanted);
    }
}

void stop_workers(Pool& p) {
    p.region.set(STOP);
    for (Worker* worker : p.workers) {
        pthread_join(worker->thread, nullptr);
        delete worker;
    }
    p.workers.clear();
    p.region.value.store(0);
}

// As many threads as were asked for, or as many as the system gives.
void start_workers(Pool& p) {
    for (int index = 1; index < p.wanted; ++index) {
        auto* worker = new Worker{&p, index, {}};
        if (pthread_create(&worker->thread, nullptr, work, worker)) {
            delete worker;
            break;
        }
        p.workers.push_back(worker);
    }
}

void after_fork() {
    // The threads stayed in the parent, and its locks may be held by them: start over, and leave the old one be.
    const int wanted = pool ? pool->wanted : 1;
#if !defined(__linux__)
    lot = new ParkingLot;
#endif
    pool = new Pool;
    pool->wanted = wanted;
}

Pool& the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, after_fork);
    });
    return *pool;
}

bool reserve_scratch(Pool& p, size_t bytes) {
    if (bytes <= p.scratch_bytes) return true;
    free(p.shared.scratch);
    p.scratch_bytes = 0;
    const size_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    p.shared.scratch = static_cast<char*>(aligned_alloc(4096, rounded));
    if (!p.shared.scratch) return false;
    p.scratch_bytes = rounded;
    return true;
}

thread_local Recorder* recorder = nullptr;

}  // namespace

bool run_region(void (*body)(void*, Team&), void* context, size_t scratch, int64_t rows) {
    Pool& p = the_pool();
    std::lock_guard<std::mutex> lock(p.one_region);
    if (!reserve_scratch(p, scratch)) abort();  // out of memory with no way to say so: as operator new in a worker
    if (p.workers.size() + 1 != static_cast<size_t>(p.wanted)) {
        stop_workers(p);
        start_workers(p);
        p.wanted = static_cast<int>(p.workers.size()) + 1;
    }
    p.body = body;
    p.context = context;
    p.rows = rows;
    p.shared.counters[0].store(0, std::memory_order_relaxed);
    p.shared.counters[1].store(0, std::memory_order_relaxed);
    p.shared.lost.store(0, std::memory_order_relaxed);
    // Barriers are numbered through all regions: a worker that is slow to leave the last one must not find its number
    // again. Nobody passes a barrier now, so this is the same number for everybody.
    p.first_phase = p.shared.passed.value.load(std::memory_order_relaxed);
    const bool together = !p.workers.empty() && p.crowd.alone == 0;
    if (together) {
        uint32_t number = p.region.value.load(std::memory_order_relaxed) + 1;
        p.region.set(number == STOP ? 1 : number);
    }
    const uint64_t began = ticks();
    const uint64_t waited = take_part(p, 0, together ? p.wanted : 1);
    p.crowd.note(ticks() - began, waited, together);
    return !p.shared.lost.load(std::memory_order_relaxed);
}

void set_recorder(Recorder* to) { recorder = to; }

}  // namespace mill

namespace {

struct OneOp {
    const mill::OpEntry* op;
    const void* args;
};

void run_one(void* context, mill::Team& team) {
    const auto& one = *static_cast<OneOp*>(context);
    one.op->run(one.args, team);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// How many threads regions run on from now on, the caller included.
void tm_pool_resize(int threads) {
    mill::Pool& p = mill::the_pool();
    std::lock_guard<std::mutex> lock(p.one_region);
    const int wanted = threads < 1 ? 1 : threads > mill::MAX_THREADS ? mill::MAX_THREADS : threads;
    if (wanted == p.wanted) return;
    mill::stop_workers(p);
    p.wanted = wanted;
}

int tm_pool_size() { return mill::the_pool().wanted; }

// One op in one region. 0, 1 if there is no such op, or 2 if somebody it depends on is gone.
int tm_run(uint32_t kind, const void* args) {
    const mill::OpEntry* op = mill::find_op(kind);
    if (!op) return 1;
    if (mill::recorder) {
        mill::recorder->append(*op, args);
        return 0;
    }
    OneOp one{op, args};
    return mill::run_region(run_one, &one, op->scratch ? op->scratch(args, 0) : 0, 0) ? 0 : 2;
}
}
#pragma GCC visibility pop
