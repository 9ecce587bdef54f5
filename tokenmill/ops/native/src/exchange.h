// Exchange: how ranks, processes with a piece of memory in common, hand each other tensors.
//
// Nobody waits for a rank that is gone once `ended` is set, which any process with the memory may do. Every wait ends
// then, and so does every later one; what was computed from it is void.
#pragma once

#include <cstdint>

#include "team.h"

namespace mill {

constexpr int64_t LINE = 64;
constexpr int MAX_RANKS = 64;

// A number that only grows (and begins again after 2^32), written by one rank and awaited by others.
struct Word {
    alignas(LINE) std::atomic<uint32_t> value;
    std::atomic<uint32_t> sleepers;
};

enum Verb : int64_t { kAllReduce, kAllGather, kAllToAll, kBarrier, kSend, kReceive, VERBS };

// One rank's end of a group: plain data of the process, filled by ops/native/collectives.py.
//
// A handshake: every rank fills its slot, says so in its word, waits for everybody's word and reads everybody's slot.
// There are two slots per rank, used in turn: whoever says that it has filled the next one has read all of this one, so
// when a rank comes to fill this one again, nobody reads it any more.
struct Group {
    const std::atomic<uint32_t>* ended;
    Word* filled;  // [size]: handshakes for which the rank has filled its slot
    char* slots;   // [size, 2, slot_bytes]
    Word* rings;   // [size, size, 2]: lines that a rank has written for another one, and that this one has read
    char* bytes_of_rings;  // [size, size, ring_bytes]
    int64_t rank, size, slot_bytes, ring_bytes;
    mutable int64_t looks;  // at a word before sleeping: what served well so far; of all members
    int64_t round;          // handshakes so far, counted on from where the words began
    int64_t counts[VERBS], bytes[VERBS];  // calls so far, and bytes of the rank's own tensors

    char* slot(int64_t of, uint32_t round) const { return slots + (2 * of + (round & 1)) * slot_bytes; }

    bool has_ended() const;

    // Called by all members of a team, behind a barrier by which the slot is full. False: the group has ended.
    bool meet(const Team& team, uint32_t round) const;

    bool send(int64_t to, const char* data, int64_t size);
    bool receive(int64_t source, char* data, int64_t size);

    void count(Verb verb, int64_t size) {
        counts[verb]++;
        bytes[verb] += size;
    }
};

enum CollectiveKind : uint32_t { kSum = 90, kExchange = 91 };

// x becomes the sum of all ranks' x: by pairs in the order of ranks, ((0 + 1) + (2 + 3)), the same bits for all.
struct SumArgs {
    Group* group;
    float* x;  // [rows, dim], dense
    int64_t rows, dim;
};

// Every rank's part for this one: out[i] is what rank i has at x[this rank], or at x, where it has the same for all.
struct ExchangeArgs {
    Group* group;
    const char* x;
    char* out;
    int64_t rows, row_bytes;    // of a part; rows are dense, and may be negative: see rows_of in team.h
    int64_t x_part, out_part;   // bytes from part to part; x_part is 0 where all get the same
    int64_t verb;               // which is counted; kBarrier: nothing moves, but everybody waits for everybody
};

}  // namespace mill
