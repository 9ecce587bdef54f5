// Replays tapes from several threads at once on a pool that changes its size, and compares with ops run one by one.
// Built with sanitizers by test_native_tape.py; prints "ok", or what differed.
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
void* tm_tape_begin(int64_t capacity);
void tm_tape_end();
int tm_tape_run(void* tape, int64_t rows);
void tm_tape_free(void* tape);
}

namespace {

using namespace mill;

constexpr int64_t kRows = 6, kHeads = 4, kKvHeads = 2, kDim = 8, kWidth = kHeads * kDim, kBlocks = 16, kContext = 150;
constexpr int64_t kColumns = 2048;  // of the product: each thread prepares few rows for itself, all threads many

// Norm, attention, addition and a product on memory of its own; attention has pieces that are joined behind a barrier.
struct Work {
    std::vector<float> x, normed, mixed, out, weight, cache, inputs, products;
    std::vector<int32_t> rows, context, tables;
    std::vector<uint8_t> panel;
    NormArgs norm{};
    AttentionArgs attention{};
    AddArgs add{};
    MatmulArgs matmul{};

    explicit Work(unsigned seed)
        : x(kRows * kWidth), normed(x.size()), mixed(x.size()), out(x.size()), weight(kWidth, 1.5f),
          cache(2 * kRows * kBlocks * 16 * kKvHeads * kDim), inputs(kRows * kColumns), products(kRows * PANEL),
          rows(kRows), context(kRows, int32_t(kContext)), tables(kRows * kBlocks),
          panel(size_t(panel_bytes(INT8, kColumns)), 0x3c) {  // as scales 1.06, as codes -68
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (float& one : x) one = normal(random);
        for (float& one : cache) one = normal(random);
        for (float& one : inputs) one = normal(random);
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
        add = {normed.data(), mixed.data(), out.data(), -1, kWidth, kWidth, kWidth, kWidth};
        matmul.x = inputs.data(), matmul.x_stride = matmul.k = kColumns;
        matmul.out = products.data(), matmul.out_stride = PANEL;
        matmul.m = -1, matmul.num_segments = 1;
        matmul.segments[0] = {panel.data(), PANEL, INT8};
    }

    void* record() {
        void* tape = tm_tape_begin(kRows);
        for (int layer = 0; layer < 4; layer++) {
            tm_run(kNorm, &norm);
            tm_run(kAttention, &attention);
            tm_run(kAdd, &add);
            tm_run(MATMUL, &matmul);
        }
        tm_tape_end();
        return tape;
    }

    void compute() {
        NormArgs n = norm;
        AttentionArgs a = attention;
        AddArgs d = add;
        MatmulArgs m = matmul;
        n.rows = a.n = a.singles = d.rows = m.m = kRows;
        tm_run(kNorm, &n);
        tm_run(kAttention, &a);
        tm_run(kAdd, &d);
        tm_run(MATMUL, &m);
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
            const std::vector<float> expected = work.out, expected_products = work.products;
            void* tape = work.record();
            for (int turn = 0; turn < 200; turn++) {
                const int64_t rows = 1 + turn % kRows;
                std::memset(work.out.data(), 0, work.out.size() * sizeof(float));
                std::memset(work.products.data(), 0, work.products.size() * sizeof(float));
                if (tm_tape_run(tape, rows)) failures[number]++;
                if (std::memcmp(work.out.data(), expected.data(), size_t(rows * kWidth) * sizeof(float)) ||
                    std::memcmp(work.products.data(), expected_products.data(), size_t(rows * PANEL) * sizeof(float)))
                    failures[number]++;
                if (turn % 50 == 49) tm_pool_resize(1 + (turn / 50 + int(number)) % 4);
            }
            tm_tape_free(tape);
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
