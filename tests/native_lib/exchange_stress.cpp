// Ranks exchange tensors as threads of one program, each rank with a team of several, and are ended in the middle.
// Built with sanitizers by test_native_exchange.py; prints "ok", or what differed.
#include "exchange.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ops.h"

namespace {

using namespace mill;

constexpr int64_t kSlot = 4096, kRing = 4096;
constexpr uint32_t kFirst = 0xffffff80;  // words begin again on the way

struct Memory {
    std::atomic<uint32_t> ended{0};
    std::vector<Word> filled, rings;
    std::vector<char> slots, bytes_of_rings;

    explicit Memory(int64_t size)
        : filled(size), rings(2 * size * size), slots(size * 2 * kSlot), bytes_of_rings(size * size * kRing) {
        for (Word& word : filled) word.value = kFirst;
        for (Word& word : rings) word.value = kFirst;
    }

    Group group(int64_t rank, int64_t size) {
        return {&ended, filled.data(), slots.data(), rings.data(), bytes_of_rings.data(),
                rank, size, kSlot, kRing, 200, int64_t(kFirst), {}, {}};
    }
};

float value_of(int64_t rank, int64_t turn, int64_t i) { return float((rank * 7919 + turn * 31 + i * 17) % 1009) * 0.37f; }

float sum_of(const float* parts, int64_t n) {  // by pairs, written the other way round than in the kernel
    if (n == 1) return parts[0];
    int64_t half = 1;
    while (2 * half < n) half *= 2;
    return sum_of(parts, half) + sum_of(parts + half, n - half);
}

// What the members of one rank share.
struct Rank {
    Group group;
    Shared shared;
    std::vector<float> x, out;
    int64_t wrong = 0, turns = 0;
};

void work(Memory& memory, Rank& rank, int member, int members, int64_t all_turns, int64_t end_at) {
    Team team;
    team.index = member;
    team.count = members;
    team.shared = &rank.shared;
    const int64_t size = rank.group.size, own = rank.group.rank;
    std::mt19937 random(5);  // the same sizes for everybody
    for (int64_t turn = 0; turn < all_turns; turn++) {
        const int64_t rows = 1 + random() % 6, dim = 1 + random() % 700, verb = random() % 3, n = rows * dim;
        team.rows = rows;
        if (member == 0) {
            rank.x.resize(size_t(size * n));
            rank.out.assign(size_t(size * n), -1.0f);
            for (int64_t i = 0; i < size * n; i++) rank.x[i] = value_of(own, turn, i);
            if (turn == end_at && own == size - 1) memory.ended = 1;
        }
        team.barrier();
        SumArgs sum{&rank.group, rank.x.data(), -1, dim};
        ExchangeArgs args{&rank.group, (const char*)rank.x.data(), (char*)rank.out.data(), -1, dim * 4,
                          verb == 2 ? n * 4 : 0, n * 4, verb};
        if (verb == 0) find_op(kSum)->run(&sum, team);
        else find_op(kExchange)->run(&args, team);
        team.barrier();
        if (team.stopped()) break;
        if (member) continue;
        float parts[MAX_RANKS];
        for (int64_t i = 0; i < n; i++) {
            if (verb == 0) {
                for (int64_t other = 0; other < size; other++) parts[other] = value_of(other, turn, i);
                rank.wrong += rank.x[i] != sum_of(parts, size);
                continue;
            }
            for (int64_t other = 0; other < size; other++)
                rank.wrong += rank.out[other * n + i] != value_of(other, turn, i + (verb == 2 ? own * n : 0));
        }
        // Round the ring: nobody waits for everybody, since one receives first.
        std::vector<float> received(size_t(n), 0.0f);
        const int64_t next = (own + 1) % size, before = (own + size - 1) % size;
        bool there = true;
        for (int step = 0; step < 2; step++)
            there &= (step == (own == 0)) ? rank.group.send(next, (const char*)rank.x.data(), n * 4)
                                          : rank.group.receive(before, (char*)received.data(), n * 4);
        if (!there) continue;  // the next op will find the same
        for (int64_t i = 0; i < n && verb; i++) rank.wrong += received[i] != value_of(before, turn, i);
        rank.turns++;
    }
}

int64_t run(int64_t size, int members, int64_t turns, int64_t end_at) {
    Memory memory(size);
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < size; rank++) {
        ranks.push_back(std::make_unique<Rank>());
        ranks.back()->group = memory.group(rank, size);
    }
    for (auto& rank : ranks)
        for (int member = 0; member < members; member++)
            threads.emplace_back([&, member] { work(memory, *rank, member, members, turns, end_at); });
    for (std::thread& thread : threads) thread.join();
    int64_t wrong = 0;
    for (auto& rank : ranks) {
        const int64_t expected = end_at < 0 ? turns : rank->turns;
        wrong += rank->wrong + (rank->turns != expected) + (end_at >= 0 && rank->turns > end_at + 1);
    }
    return wrong;
}

}  // namespace

int main() {
    int64_t wrong = 0;
    for (int64_t size = 1; size <= 4; size++)
        for (int members = 1; members <= 2; members++) {
            if (size > 1) wrong += run(size, members, 150, -1);
            for (int64_t end_at : {0, 7, 40}) wrong += size > 1 ? run(size, members, 150, end_at) : 0;
        }
    if (wrong) std::printf("%lld were wrong\n", (long long)wrong);
    else std::printf("ok\n");
    return wrong != 0;
}
