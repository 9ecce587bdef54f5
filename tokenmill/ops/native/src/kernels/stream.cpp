// ENTER: in a recorded step, says which layer is computed next, and waits until its weights are there.
// FETCH: says which experts a layer's tokens chose, waits until those are there, and where each lies.
#include <time.h>
#include <unistd.h>

#include "ops.h"
#include "routing.h"

namespace mill {
namespace TM_NS {
namespace {

struct EnterArgs {
    int64_t* told;         // the layer that is computed, how often it was waited for, and for how many nanoseconds
    const int64_t* there;  // 1: the layer's weights are there; -1: they cannot be brought. nullptr: they always are
    int64_t layer;
    int64_t bell;  // a pipe that whoever brings layers listens at
};

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

void enter(const void* args, Team& team) {
    const EnterArgs& a = *static_cast<const EnterArgs*>(args);
    if (team.index) return;  // the others wait at the barrier behind this op
    __atomic_store_n(&a.told[0], a.layer, __ATOMIC_SEQ_CST);
    const char ring = 1;
    [[maybe_unused]] const ssize_t rung = write(int(a.bell), &ring, 1);  // a full pipe has rung already
    if (!a.there) return;
    int64_t state = __atomic_load_n(a.there, __ATOMIC_SEQ_CST);
    if (!state) {
        const int64_t began = now();
        while (!(state = __atomic_load_n(a.there, __ATOMIC_ACQUIRE))) {
            const timespec moment{0, 50000};
            nanosleep(&moment, nullptr);
        }
        a.told[1] += 1;
        a.told[2] += now() - began;
    }
    if (state < 0) team.lose();
}

struct FetchArgs {
    int64_t* told;        // numbers by the names in routing.h
    const int64_t* slot;  // [experts]: the layer's slot that an expert is in, or -1
    const int64_t* buffer, *owner;  // [experts]: 1 where it is in the buffer; and whose experts those are
    int64_t *used, *early;  // [experts]: the last call that chose it; 1 where it was foreseen, and not chosen since
    const int64_t* chosen;  // [rows, top_k]
    int64_t* places;        // [rows, top_k]: a slot, or behind all slots, the expert's own place in the buffer
    int64_t number, experts, slots, rows, top_k, is_last, bell;  // number: among the layers with experts
};

int64_t place_of(const FetchArgs& a, int64_t expert) {
    const int64_t slot = __atomic_load_n(&a.slot[expert], __ATOMIC_SEQ_CST);
    if (slot >= 0) return slot;
    const bool mine = __atomic_load_n(a.owner, __ATOMIC_SEQ_CST) == a.number;
    return mine && __atomic_load_n(&a.buffer[expert], __ATOMIC_SEQ_CST) ? a.slots + expert : -1;
}

// Where every choice lies, and whether all are there: each is looked up once, since it may be taken and given back.
bool find(const FetchArgs& a, int64_t choices) {
    bool there = true;
    for (int64_t i = 0; i < choices; ++i) there &= (a.places[i] = place_of(a, a.chosen[i])) >= 0;
    return there;
}

void ring(int64_t bell) {
    const char once = 1;
    [[maybe_unused]] const ssize_t rung = write(int(bell), &once, 1);  // a full pipe has rung already
}

void fetch(const void* args, Team& team) {
    const FetchArgs& a = *static_cast<const FetchArgs*>(args);
    if (team.index) return;  // the others wait at the barrier behind this op
    const int64_t choices = rows_of(a.rows, team.rows) * a.top_k, call = a.told[TOLD_CALL] + 1;
    __atomic_store_n(&a.told[TOLD_CALL], call, __ATOMIC_SEQ_CST);  // from here on nothing of this layer is taken away
    __atomic_store_n(&a.told[TOLD_LAYER], a.number, __ATOMIC_SEQ_CST);
    bool there = find(a, choices);
    int64_t different = 0, missing = 0, foreseen = 0;
    for (int64_t i = 0; i < choices; ++i) {
        const int64_t expert = a.chosen[i];
        if (a.used[expert] == call) continue;
        a.used[expert] = call;
        ++different;
        if (a.early[expert])
            ++foreseen;
        else
            missing += a.places[i] < 0;
        a.early[expert] = 0;
    }
    a.told[TOLD_HITS] += different - missing - foreseen;
    a.told[TOLD_MISSES] += missing;
    a.told[TOLD_FORESEEN] += foreseen;
    while (!there) {
        const int64_t began = now();
        __atomic_store_n(&a.told[TOLD_ASKED], call, __ATOMIC_SEQ_CST);
        ring(a.bell);
        int64_t answered;
        while (-call < (answered = __atomic_load_n(&a.told[TOLD_ANSWERED], __ATOMIC_ACQUIRE)) && answered < call) {
            const timespec moment{0, 20000};
            nanosleep(&moment, nullptr);
        }
        a.told[TOLD_STALLS] += 1;
        a.told[TOLD_STALL_NS] += now() - began;
        if (answered < 0) return team.lose();
        // Should one be away all the same, it is asked for again: unless nobody answers any more, it is unanswered.
        if (!(there = find(a, choices)))
            __atomic_compare_exchange_n(&a.told[TOLD_ANSWERED], &answered, call - 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    const bool most = different * MOST_PARTS >= a.experts * MOST_OF_THEM;
    a.told[TOLD_FORESEES] = !most && !a.is_last && __atomic_load_n(&a.told[TOLD_MAY_FORESEE], __ATOMIC_SEQ_CST);
    if (most && !a.is_last) {  // the next layer's will be chosen, too
        __atomic_store_n(&a.told[TOLD_STREAM], call, __ATOMIC_SEQ_CST);
        ring(a.bell);
    }
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(stream)[] = {
    {ENTER, sizeof(TM_NS::EnterArgs), TM_NS::enter, nullptr},
    {FETCH, sizeof(TM_NS::FetchArgs), TM_NS::fetch, nullptr},
    {},
};

}  // namespace mill
