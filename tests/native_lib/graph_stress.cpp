// Replays graphs from several threads at once on a pool that changes its size, and compares with ops run one by one.
// Built with sanitizers by test_native_graph.py; prints "ok", or what differed.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "matrix.h"
#include "ops.h"

extern "C" {
void tm_pool_resize(int threads);
int tm_run(uint32_t kind, const void* args);
void* tm_graph_begin(int64_t capacity);
void tm_graph_end();
int tm_graph_run(void* graph, int64_t rows);
void tm_graph_free(void* graph);
}

namespace {

using namespace mill;

constexpr int64_t kRows = 6, kHeads = 4, kKvHeads = 2, kDim = 8, kWidth = kHeads * kDim, kBlocks = 16, kContext = 150;
constexpr int64_t kColumns = 2048;  // of the product: each thread prepares few rows for itself, all threads many

// Norm, rotation with the write of codes, attention over floats and over codes, addition and a product on memory of its
// own; attention has pieces that are joined behind a barrier.
struct Work {
    std::vector<float> x, normed, mixed, out, weight, cache, inputs, products, fresh, angles, recalled;
    std::vector<int8_t> codes;      // a cache like the other, in eight bits
    std::vector<uint16_t> scales;
    std::vector<int64_t> positions, slots;
    std::vector<int32_t> rows, context, tables;
    std::vector<uint8_t> panel;
    NormArgs norm{};
    RopeArgs rope{};
    AttentionArgs attention{}, recall{};
    AddArgs add{};
    MatmulArgs matmul{};

    explicit Work(unsigned seed)
        : x(kRows * kWidth), normed(x.size()), mixed(x.size()), out(x.size()), weight(kWidth, 1.5f),
          cache(2 * kRows * kBlocks * 16 * kKvHeads * kDim), inputs(kRows * kColumns), products(kRows * PANEL),
          fresh(2 * kRows * kKvHeads * kDim), angles(kDim), recalled(x.size()), codes(cache.size(), 5),
          scales(cache.size() / kDim, 0x3c80), positions(kRows), slots(kRows),
          rows(kRows), context(kRows, int32_t(kContext)), tables(kRows * kBlocks),
          panel(size_t(panel_bytes(INT8, kColumns)), 0x3c) {  // as scales 1.06, as codes -68
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (float& one : x) one = normal(random);
        for (float& one : cache) one = normal(random);
        for (float& one : inputs) one = normal(random);
        for (float& one : fresh) one = normal(random);
        for (float& one : angles) one = normal(random);
        for (int32_t i = 0; i < kRows; i++) rows[i] = i;
        for (size_t i = 0; i < tables.size(); i++) tables[i] = int32_t(i);
        norm = {x.data(), nullptr, weight.data(), nullptr, normed.data(), -1, kWidth, kWidth, 0, 0, kWidth, 0, 1e-5};
        const int64_t slot = kKvHeads * kDim, block = 16 * slot;
        attention.q = normed.data();
        attention.k = cache.data();
        attention.v = cache.data() + cache.size() / 2;
        attention.out = mixed.data();
        attention.rows = rows.data();
        attention.context = context.data();
        attention.tables = tables.data();
        attention.n = attention.singles = -1;
        attention.heads = kHeads;
        attention.kv_heads = kKvHeads;
        attention.k_dim = attention.v_dim = kDim;
        attention.block_size = 16;
        attention.q_token = attention.out_token = kWidth;
        attention.q_head = attention.out_head = kDim;
        attention.k_block = attention.v_block = block;
        attention.k_slot = attention.v_slot = slot;
        attention.k_head = attention.v_head = kDim;
        attention.table_row = kBlocks;
        attention.scale = 0.3;
        recall = attention;
        recall.k = codes.data();
        recall.v = codes.data() + codes.size() / 2;
        recall.k_scales = scales.data();
        recall.v_scales = scales.data() + scales.size() / 2;
        recall.k_scale_block = recall.v_scale_block = 16 * kKvHeads;
        recall.k_scale_slot = recall.v_scale_slot = kKvHeads;
        recall.k_scale_head = recall.v_scale_head = 1;
        recall.cache_storage = kCodes;
        recall.out = recalled.data();
        for (int64_t i = 0; i < kRows; i++)
            slots[i] = tables[i * kBlocks + (kContext - 1) / 16] * 16 + (kContext - 1) % 16;
        rope.q = normed.data();
        rope.k = fresh.data();
        rope.v = fresh.data() + fresh.size() / 2;
        rope.table = angles.data();
        rope.positions = positions.data();
        rope.slots = slots.data();
        rope.k_cache = codes.data();
        rope.v_cache = codes.data() + codes.size() / 2;
        rope.k_scales = scales.data();
        rope.v_scales = scales.data() + scales.size() / 2;
        rope.tokens = -1;
        rope.heads = kHeads;
        rope.kv_heads = kKvHeads;
        rope.dim = rope.v_dim = rope.rotated = kDim;
        rope.block_size = 16;
        rope.q_token = kWidth;
        rope.q_head = rope.k_head = rope.v_head = kDim;
        rope.k_token = rope.v_token = slot;
        rope.k_block = rope.v_block = block;
        rope.k_slot = rope.v_slot = slot;
        rope.k_cache_head = rope.v_cache_head = kDim;
        rope.k_scale_block = rope.v_scale_block = 16 * kKvHeads;
        rope.k_scale_slot = rope.v_scale_slot = kKvHeads;
        rope.k_scale_head = rope.v_scale_head = 1;
        rope.cache_storage = kCodes;
        add = {normed.data(), mixed.data(), out.data(), -1, kWidth, kWidth, kWidth, kWidth};
        matmul.x = inputs.data(), matmul.x_stride = matmul.k = kColumns;
        matmul.out = products.data(), matmul.out_stride = PANEL;
        matmul.m = -1, matmul.num_segments = 1;
        matmul.segments[0] = {panel.data(), PANEL, INT8};
    }

    void* record() {
        void* graph = tm_graph_begin(kRows);
        for (int layer = 0; layer < 4; layer++) {
            tm_run(kNorm, &norm);
            tm_run(kRope, &rope);
            tm_run(kAttention, &attention);
            tm_run(kAttention, &recall);
            tm_run(kAdd, &add);
            tm_run(MATMUL, &matmul);
        }
        tm_graph_end();
        return graph;
    }

    void compute() {
        NormArgs n = norm;
        RopeArgs r = rope;
        AttentionArgs a = attention, c = recall;
        AddArgs d = add;
        MatmulArgs m = matmul;
        n.rows = r.tokens = a.n = a.singles = c.n = c.singles = d.rows = m.m = kRows;
        tm_run(kNorm, &n);
        tm_run(kRope, &r);
        tm_run(kAttention, &a);
        tm_run(kAttention, &c);
        tm_run(kAdd, &d);
        tm_run(MATMUL, &m);
    }

    // How far the result of singles is from that of the same queries as chunks of one token.
    float from_chunks(const AttentionArgs& given) {
        AttentionArgs a = given;
        std::vector<int32_t> starts(kRows + 1);
        std::vector<float> found(x.size());
        for (int32_t i = 0; i <= kRows; i++) starts[i] = i;
        a.q_start = starts.data();
        a.n = kRows;
        a.singles = 0;
        a.out = found.data();
        tm_run(kAttention, &a);
        float most = 0;
        for (size_t i = 0; i < found.size(); i++) most = std::fmax(most, std::fabs(found[i] - given.out[i]));
        return most;
    }
};

}  // namespace

int main() {
    int wrong = 0;
    std::vector<std::thread> callers;
    std::vector<int> failures(3);
    for (unsigned number = 0; number < 3; number++) {
        callers.emplace_back([number, &failures] {
            Work work(number);
            work.compute();
            const std::vector<float> expected = work.out, expected_products = work.products, recalled = work.recalled;
            if (!(work.from_chunks(work.attention) < 1e-4f && work.from_chunks(work.recall) < 1e-4f)) failures[number]++;
            void* graph = work.record();
            for (int turn = 0; turn < 200; turn++) {
                const int64_t rows = 1 + turn % kRows;
                std::memset(work.out.data(), 0, work.out.size() * sizeof(float));
                std::memset(work.recalled.data(), 0, work.recalled.size() * sizeof(float));
                std::memset(work.products.data(), 0, work.products.size() * sizeof(float));
                if (tm_graph_run(graph, rows)) failures[number]++;
                if (std::memcmp(work.out.data(), expected.data(), size_t(rows * kWidth) * sizeof(float)) ||
                    std::memcmp(work.recalled.data(), recalled.data(), size_t(rows * kWidth) * sizeof(float)) ||
                    std::memcmp(work.products.data(), expected_products.data(), size_t(rows * PANEL) * sizeof(float)))
                    failures[number]++;
                if (turn % 50 == 49) tm_pool_resize(1 + (turn / 50 + int(number)) % 4);
            }
            tm_graph_free(graph);
        });
    }
    for (std::thread& caller : callers) caller.join();
    tm_pool_resize(1);
    for (int count : failures) wrong += count;
    if (wrong) {
        std::printf("%d replays were wrong\n", wrong);
    } else {
        std::printf("ok\n");
    }
    return wrong != 0;
}
