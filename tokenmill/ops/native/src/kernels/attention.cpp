// Attention over the paged cache: chunks by tiles of queries, singles by pieces of their keys, whichever thread is free.
#include "attention.h"

#include "attention_chunk.h"
#include "attention_decode.h"
#include "elementwise.h"
#include "ops.h"
#include "thread_scratch.h"

namespace mill {
namespace TM_NS {
namespace {

// How the work of an op is numbered: chunks first, whose pieces are the largest, then singles.
struct Plan {
    const AttentionArgs& a;
    int64_t n, singles;        // rows of this run
    int64_t group;             // heads per kv head
    int64_t head_parts;        // pieces that a group is cut into, for chunks
    int64_t heads_per_part;
    int64_t queries_per_tile;

    Plan(const AttentionArgs& a, const Team& team)
        : a(a),
          n(a.counts ? a.counts[0] : rows_of(a.n, team.rows)),
          singles(a.counts ? a.counts[1] : rows_of(a.singles, team.rows)) {
        group = a.heads / a.kv_heads;
        heads_per_part = at_most(group, kChunkRows / 2);
        head_parts = pieces(group, heads_per_part);
        queries_per_tile = kChunkRows / heads_per_part;
        // Large tiles pack their keys less often; where there are only a few, smaller ones let the threads end together.
        const int64_t queries = n > singles ? a.q_start[n] - a.q_start[singles] : 0;
        if (queries * a.kv_heads * head_parts < 4 * team.count * queries_per_tile) queries_per_tile /= 2;
    }

    int64_t queries(int64_t row) const { return a.q_start[row + 1] - a.q_start[row]; }

    // Pieces of work in a row.
    int64_t work_of(int64_t row) const {
        if (row < singles) return a.kv_heads * Cut(a, a.context[row]).count;
        return a.kv_heads * head_parts * pieces(queries(row), queries_per_tile);
    }

    ChunkTile tile(int64_t row, int64_t piece) const {
        const int64_t per_tile = a.kv_heads * head_parts;
        // The last queries see the most keys: they come first, so that the threads end together.
        const int64_t number = pieces(queries(row), queries_per_tile) - 1 - piece / per_tile;
        const int64_t part = piece % per_tile % head_parts, first = number * queries_per_tile;
        return {row,
                piece % per_tile / head_parts,
                part * heads_per_part,
                at_most(heads_per_part, group - part * heads_per_part),
                first,
                at_most(queries_per_tile, queries(row) - first)};
    }
};

float* partials_of(const AttentionArgs& a, Team& team, int64_t row, int64_t head, int64_t piece) {
    const int64_t index = (row * (kMaxPieces + 1) + piece) * a.heads + head;
    return reinterpret_cast<float*>(team.scratch()) + index * partial_floats(a);
}

size_t scratch(const void* args, int64_t rows) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    return size_t(rows_of(a.singles, rows) * (kMaxPieces + 1) * a.heads * partial_floats(a)) * sizeof(float);
}

// A piece of work: a row and which part of it. No row: nothing.
struct Item {
    int64_t row = -1, part = 0;
};

// Pieces of work in the order: chunks, singles. `next` is called by each thread for itself.
struct Items {
    const Plan& plan;
    Team& team;
    int64_t step = 0, before = 0;  // rows left behind, and the number of pieces in them

    Item next() {
        const int64_t item = team.next(), chunks = plan.n - plan.singles;
        for (; step < plan.n; step++) {
            const int64_t row = step < chunks ? plan.singles + step : step - chunks, size = plan.work_of(row);
            if (item - before < size) return {row, item - before};
            before += size;
        }
        return {};
    }
};

template <class T>
void work(const Plan& plan, Team& team, float* memory) {
    const AttentionArgs& a = plan.a;
    const auto piece_of = [&](Item item) {
        if (item.row < 0 || item.row >= plan.singles) return Piece();
        return Piece(a, item.row, item.part % a.kv_heads, item.part / a.kv_heads);
    };
    Items items{plan, team};
    Item item = items.next();
    while (item.row >= 0) {
        if (item.row >= plan.singles) {
            attend_chunk<T>(a, plan.tile(item.row, item.part), memory);
            item = items.next();
            continue;
        }
        const Item after = items.next();  // known early, so that its keys are on their way when it begins
        const Piece piece = piece_of(item);
        const int64_t first = piece.kv_head * plan.group;
        float* partial = partials_of(a, team, item.row, first, item.part / a.kv_heads);
        attend_piece<T>(a, piece, piece_of(after), memory, partial);
        if (Cut(a, a.context[item.row]).count == 1)
            for (int64_t g = 0; g < plan.group; g++) join(a, item.row, first + g, partial + g * partial_floats(a), 1, 0);
        item = after;
    }
}

void attend(const void* args, Team& team) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    const Plan plan(a, team);
    float* memory = thread_scratch(size_t(at_least(plan.n > plan.singles ? ChunkScratch::floats(a) : 0, piece_floats(a))));
    if (a.cache_storage == kFloat) work<float>(plan, team, memory);
    if (a.cache_storage == kHalf) work<Half>(plan, team, memory);
    if (a.cache_storage == kBrain) work<Brain>(plan, team, memory);
    if (a.cache_storage == kCodes) work<int8_t>(plan, team, memory);
    bool cut = false;
    for (int64_t row = 0; row < plan.singles; row++) cut |= Cut(a, a.context[row]).count > 1;
    if (!cut) return;
    team.barrier();
    int64_t begin, end;
    team.share(plan.singles * a.heads, begin, end);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / a.heads, head = unit % a.heads, count = Cut(a, a.context[row]).count;
        if (count > 1) join(a, row, head, partials_of(a, team, row, head, 0), count, a.heads * partial_floats(a));
    }
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(attention)[] = {{kAttention, sizeof(AttentionArgs), TM_NS::attend, TM_NS::scratch}, {}};

}  // namespace mill
