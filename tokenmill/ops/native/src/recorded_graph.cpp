// The graph: ops recorded once, with their arguments, and replayed as one parallel region with a barrier between them.
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "ops.h"

namespace {

struct Entry {
    const mill::OpEntry* op;
    size_t args;  // offset of its arguments
};

struct RecordedGraph final : mill::Recorder {
    int64_t capacity;  // rows of the buffers it was recorded with
    int level;
    size_t scratch = 0;
    std::vector<Entry> entries;
    std::vector<char> args;

    explicit RecordedGraph(int64_t capacity, int level) : capacity(capacity), level(level) {}

    void append(const mill::OpEntry& op, const void* given) override {
        const size_t at = (args.size() + 15) / 16 * 16;
        args.resize(at + op.args_bytes);
        std::memcpy(args.data() + at, given, op.args_bytes);
        entries.push_back({&op, at});
        const size_t wanted = op.scratch ? op.scratch(given, capacity) : 0;
        if (wanted > scratch) scratch = wanted;
    }
};

void replay(void* context, mill::Team& team) {
    const auto& graph = *static_cast<const RecordedGraph*>(context);
    const size_t count = graph.entries.size();
    for (size_t i = 0; i < count; ++i) {
        if (i) team.barrier();
        if (team.stopped()) return;
        const Entry& entry = graph.entries[i];
        entry.op->run(graph.args.data() + entry.args, team);
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int tm_level();

// A graph for steps of up to `capacity` rows. Until tm_graph_end, ops that this thread runs are put into it instead of
// being computed. Counts of rows on it are negative: multiples of the rows of a later run.
void* tm_graph_begin(int64_t capacity) {
    auto* graph = new (std::nothrow) RecordedGraph(capacity, tm_level());
    mill::set_recorder(graph);
    return graph;
}

void tm_graph_end() { mill::set_recorder(nullptr); }

int64_t tm_graph_length(const void* graph) { return static_cast<int64_t>(static_cast<const RecordedGraph*>(graph)->entries.size()); }

// Compute everything in the graph for the first `rows` rows of its buffers. 0, or 1 where it cannot be done: too many
// rows, or a level of the CPU other than that of the recording. 2 where somebody it depends on is gone: what was
// computed is void.
int tm_graph_run(void* given, int64_t rows) {
    auto* graph = static_cast<RecordedGraph*>(given);
    if (rows < 0 || rows > graph->capacity || graph->level != tm_level()) return 1;
    return mill::run_region(replay, graph, graph->scratch, rows) ? 0 : 2;
}

void tm_graph_free(void* graph) { delete static_cast<RecordedGraph*>(graph); }
}
#pragma GCC visibility pop
