// Sums and exchanges of tensors between processes: copy into the own slot, meet, take from everybody's slots.
#include "exchange.h"
#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {
namespace {

struct Span {
    int64_t begin, end;
};

// A member's share of `items`, in whole lines of `per_line`.
Span share_of(int64_t items, int64_t per_line, const Team& team) {
    Span mine;
    team.share((items + per_line - 1) / per_line, mine.begin, mine.end);
    mine.begin *= per_line;
    mine.end = mine.end * per_line < items ? mine.end * per_line : items;
    return mine;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The sum of `n` values by pairs, left in the first; what has no partner waits for the next round.
template <class T>
T by_pairs(T* values, int64_t n) {
    for (int64_t step = 1; step < n; step *= 2)
        for (int64_t i = 0; i + step < n; i += 2 * step) values[i] += values[i + step];
    return values[0];
}

template <int64_t SIZE>  // 0: as many as there are
void add_up(const float* const* parts, int64_t size, float* out, Span mine) {
    const int64_t n = SIZE ? SIZE : size;
    constexpr int64_t MOST = SIZE ? SIZE : MAX_RANKS;
    int64_t i = mine.begin;
    for (; i + W <= mine.end; i += W) {
        Vec values[MOST];
        for (int64_t part = 0; part < n; part++) values[part] = load(parts[part] + i);
        store(out + i, by_pairs(values, n));
    }
    for (; i < mine.end; i++) {
        float values[MOST];
        for (int64_t part = 0; part < n; part++) values[part] = parts[part][i];
        out[i] = by_pairs(values, n);
    }
}

// Tensors longer than a slot go in pieces, one handshake each. Every member passes all barriers whatever happens:
// others may have found everybody there where this one found the group ended. But a member that did no longer touches
// slots: nobody waits for each other now, and who was in time reads on, and may rely on what it reads.
void sum_of_ranks(const SumArgs& a, Team& team) {
    constexpr int64_t PER_LINE = LINE / int64_t(sizeof(float));
    Group& group = *a.group;
    const int64_t all = rows_of(a.rows, team.rows) * a.dim, most = group.slot_bytes / int64_t(sizeof(float));
    int64_t round = group.round;
    bool there = !group.has_ended();
    for (int64_t at = 0; at < all; at += most, round++) {
        const Span mine = share_of(smaller(all - at, most), PER_LINE, team);
        float* x = a.x + at;
        const float* parts[MAX_RANKS];
        for (int64_t rank = 0; rank < group.size; rank++)
            parts[rank] = reinterpret_cast<const float*>(group.slot(rank, uint32_t(round)));
        if (there && mine.begin < mine.end)
            std::memcpy(const_cast<float*>(parts[group.rank]) + mine.begin, x + mine.begin,
                        size_t(mine.end - mine.begin) * sizeof(float));
        team.barrier();
        there = group.meet(team, uint32_t(round)) && there;
        if (!there) continue;
        parts[group.rank] = x;
        if (group.size == 2) add_up<2>(parts, 2, x, mine);
        else if (group.size == 4) add_up<4>(parts, 4, x, mine);
        else add_up<0>(parts, group.size, x, mine);
    }
    if (!there) team.lose();
    if (team.index == 0) {
        if (all) group.round = round;  // behind a barrier: everybody has read it
        group.count(kAllReduce, all * int64_t(sizeof(float)));
    }
}

void exchange(const ExchangeArgs& a, Team& team) {
    Group& group = *a.group;
    const int64_t size = group.size, parts = a.x_part ? size : 1;  // that a rank lays down
    const bool moves = a.verb != kBarrier;
    const int64_t part = moves ? rows_of(a.rows, team.rows) * a.row_bytes : 1;
    const int64_t most = group.slot_bytes / parts / LINE * LINE;
    int64_t round = group.round;
    bool there = !group.has_ended();
    for (int64_t at = 0; at < part; at += most, round++) {
        const Span mine = share_of(smaller(part - at, most), LINE, team);
        const size_t bytes = mine.begin < mine.end ? size_t(mine.end - mine.begin) : 0;
        char* slot = group.slot(group.rank, uint32_t(round)) + mine.begin;
        const int64_t from = at + mine.begin;
        if (there && moves && bytes)
            for (int64_t to = 0; to < parts; to++)
                if (parts == 1 || to != group.rank) std::memcpy(slot + to * most, a.x + to * a.x_part + from, bytes);
        team.barrier();
        there = group.meet(team, uint32_t(round)) && there;
        if (!there || !moves || !bytes) continue;
        for (int64_t source = 0; source < size; source++) {
            const char* theirs = group.slot(source, uint32_t(round)) + mine.begin + (parts == 1 ? 0 : group.rank * most);
            const char* own = a.x + (parts == 1 ? 0 : group.rank * a.x_part) + from;
            std::memcpy(a.out + source * a.out_part + from, source == group.rank ? own : theirs, bytes);
        }
    }
    if (!there) team.lose();
    if (team.index == 0) {
        if (part) group.round = round;
        group.count(Verb(a.verb), moves ? part * parts : 0);
    }
}

template <class Args, void (*op)(const Args&, Team&)>
void call(const void* args, Team& team) {
    op(*static_cast<const Args*>(args), team);
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(collectives)[] = {
    {kSum, sizeof(SumArgs), TM_NS::call<SumArgs, TM_NS::sum_of_ranks>, nullptr},
    {kExchange, sizeof(ExchangeArgs), TM_NS::call<ExchangeArgs, TM_NS::exchange>, nullptr},
    {},
};

}  // namespace mill
