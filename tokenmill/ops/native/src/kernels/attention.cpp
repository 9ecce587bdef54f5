// Attention over the paged cache: chunks by tiles of queries, singles by pieces of their keys, whichever thread is free.
#include "attention.h"

#include "attention_chunk.h"
#include "attention_decode.h"
#include "elementwise.h"
#include "ops.h"
#include "thread_scratch.h"

#if TM_LEVEL < 3

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

    Plan(const AttentionArgs& a, const Team& team) : a(a), n(rows_of(a.n, team.rows)), singles(rows_of(a.singles, team.rows)) {
        group = a.heads / a.kv_heads;
        heads_per_part = at_most(group, kChunkRows);
        head_parts = pieces(group, heads_per_part);
        queries_per_tile = kChunkRows / heads_per_part;
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
    const int64_t index = (row * kMaxSplits + piece) * a.heads + head;
    return reinterpret_cast<float*>(team.scratch()) + index * partial_floats(a);
}

size_t scratch(const void* args, int64_t rows) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    return size_t(rows_of(a.singles, rows) * kMaxSplits * a.heads * partial_floats(a)) * sizeof(float);
}

void work(const Plan& plan, Team& team, int64_t row, int64_t piece, float* memory) {
    const AttentionArgs& a = plan.a;
    if (row >= plan.singles) return attend_chunk(a, plan.tile(row, piece), memory);
    const int64_t kv_head = piece % a.kv_heads, first = kv_head * plan.group;
    piece /= a.kv_heads;
    float* partial = partials_of(a, team, row, first, piece);
    attend_piece(a, row, kv_head, piece, memory, partial);
    if (Cut(a, a.context[row]).count > 1) return;
    for (int64_t g = 0; g < plan.group; g++) join(a, row, first + g, partial + g * partial_floats(a), 1, 0);
}

void attend(const void* args, Team& team) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    const Plan plan(a, team);
    float* memory = thread_scratch(size_t(at_least(plan.n > plan.singles ? ChunkScratch::floats(a) : 0, piece_floats(a))));
    // Rows are met in the order: chunks, singles. `before` is the number of pieces in the rows already left behind.
    int64_t step = 0, before = 0;
    const auto row_at = [&](int64_t i) { return i < plan.n - plan.singles ? plan.singles + i : i - (plan.n - plan.singles); };
    for (int64_t item = team.next(); step < plan.n; item = team.next()) {
        int64_t size;
        while (step < plan.n && item - before >= (size = plan.work_of(row_at(step)))) {
            before += size;
            step++;
        }
        if (step < plan.n) work(plan, team, row_at(step), item - before, memory);
    }
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

#else  // integer products are of no use here: the level below serves this one as well

namespace mill {
extern const OpEntry TM_OPS(attention)[] = {{}};
}

#endif
