// Runs the native ops at one CPU level on inputs that are the same on every machine, and writes what they give, to be compared
// with another machine's. Used by test_native_arm.py: `level_results LEVEL THREADS` writes to the standard output, for each
// result, a line "name type count" and its bytes.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "low_rank.h"
#include "matrix.h"
#include "routing.h"

extern "C" {
void tm_pool_resize(int threads);
int tm_run(uint32_t kind, const void* args);
int tm_set_level(int level);
uint32_t tm_crc32c(const void* data, size_t size, int plain);
}

namespace {

using namespace mill;

std::mt19937 source;  // whose numbers the standard fixes, as it does not those of its distributions

int64_t below(int64_t limit) { return int64_t(source() % uint64_t(limit)); }
float number() { return float(int32_t(source() >> 8) - (1 << 23)) * 0x1p-23f; }  // from -1 to 1, exact

std::vector<float> floats(int64_t count, float scale = 1) {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& one : out) one = number() * scale;
    return out;
}

std::vector<uint8_t> bytes(int64_t count) {
    std::vector<uint8_t> out(static_cast<size_t>(count));
    for (uint8_t& one : out) one = uint8_t(source());
    return out;
}

std::vector<uint16_t> halves(int64_t count) {  // of either type: below 2
    std::vector<uint16_t> out(static_cast<size_t>(count));
    for (uint16_t& one : out) one = uint16_t(source() & 0xbfff);
    return out;
}

// Memory of `count` numbers of a storage type.
std::vector<uint8_t> stored(int64_t count, int64_t storage) {
    std::vector<uint8_t> out;
    const auto take = [&](const auto& numbers) {
        out.resize(numbers.size() * sizeof(numbers[0]));
        std::memcpy(out.data(), numbers.data(), out.size());
    };
    if (storage == kFloat) take(floats(count));
    if (storage == kHalf || storage == kBrain) take(halves(count));
    if (storage == kCodes) take(bytes(count));
    return out;
}

template <class T>
void give(const std::string& name, const char* type, const std::vector<T>& what) {
    std::printf("%s %s %zu\n", name.c_str(), type, what.size());
    std::fwrite(what.data(), sizeof(T), what.size(), stdout);
}
void give(const std::string& name, const std::vector<float>& what) { give(name, "f4", what); }

void run(uint32_t kind, const void* args) {
    if (tm_run(kind, args) == 0) return;
    std::fprintf(stderr, "op %u failed\n", kind);
    std::exit(1);
}

std::string text(int64_t value) { return std::to_string(value); }

struct Format {
    int64_t number, values, bytes, form, book;
    int scales[2];  // where its 16-bit scales are; -1: none
};
constexpr Format FORMATS[] = {
    {0, 1, 4, F32, 0, {-1, -1}},          {1, 1, 2, F16, 0, {-1, -1}},          {30, 1, 2, BF16, 0, {-1, -1}},
    {2, 32, 18, INT4, 0, {0, -1}},        {3, 32, 20, INT4_MIN, 0, {0, 2}},     {6, 32, 22, INT5, 0, {0, -1}},
    {7, 32, 24, INT5_MIN, 0, {0, 2}},     {8, 32, 34, INT8, 0, {0, -1}},        {10, 256, 84, F32, 0, {80, 82}},
    {11, 256, 110, INT6_K, 0, {108, -1}}, {12, 256, 144, INT4_K, 0, {0, 2}},    {13, 256, 176, INT5_K, 0, {0, 2}},
    {14, 256, 210, INT6_K, 0, {208, -1}}, {16, 256, 66, INT8_K, 2048, {0, -1}}, {17, 256, 74, INT8_K, 4096, {0, -1}},
    {18, 256, 98, INT8_K, 1024, {0, -1}}, {20, 32, 18, INT8, 0, {0, -1}},       {21, 256, 110, INT6_K, 2048, {0, -1}},
    {22, 256, 82, INT8_K, 8192, {0, -1}}, {23, 256, 136, INT8_K, 0, {0, -1}},   {34, 256, 54, INT4, 0, {52, -1}},
    {35, 256, 66, INT4, 0, {64, -1}},     {40, 64, 36, F32, 0, {-1, -1}},
};

std::vector<uint8_t> blocks_of(const Format& format, int64_t count) {
    if (format.number == 0) return stored(count, kFloat);
    if (format.values == 1) return stored(count, kHalf);
    std::vector<uint8_t> raw = bytes(count * format.bytes);
    for (int64_t i = 0; i < count; ++i)
        for (const int at : format.scales) {
            if (at < 0) continue;
            const uint16_t scale = uint16_t(0x1c00 | (source() & 0x83ff));  // 0.004 to 0.008
            std::memcpy(raw.data() + i * format.bytes + at, &scale, 2);
        }
    return raw;
}

struct Packed {
    std::vector<uint8_t> raw, book, memory;
    Segment segment;

    Packed(const Format& format, int64_t rows, int64_t columns)
        : raw(blocks_of(format, rows * columns / format.values)), book(bytes(format.book)),
          memory(size_t((rows + PANEL - 1) / PANEL * panel_bytes(format.form, columns) + 64)) {
        for (uint8_t& one : book) one = uint8_t(1 + one % 15);
        uint8_t* panels = memory.data() + (64 - reinterpret_cast<size_t>(memory.data()) % 64) % 64;
        const RepackArgs repack{raw.data(), nullptr, book.data(), panels, rows, columns, format.number};
        run(REPACK, &repack);
        segment = {panels, rows, format.form};
    }
};

// Inputs of which one in 64 is large.
std::vector<float> inputs(int64_t count) {
    std::vector<float> x = floats(count);
    for (float& one : x)
        if (source() % 64 == 0) one *= 12;
    return x;
}

void matrices() {
    for (const Format& format : FORMATS) {
        const std::string name = "format" + text(format.number);
        const int64_t rows = 39, columns = format.values == 32 ? 544 : 512;
        const Packed packed(format, rows, columns);
        std::vector<float> all(size_t(rows * columns));
        const UnpackArgs unpack{packed.raw.data(), nullptr, packed.book.data(), all.data(), rows, columns, format.number, 0};
        run(UNPACK, &unpack);
        give("exact unpack " + name, all);
        for (int64_t storage = 1; storage <= 2; ++storage) {
            std::vector<uint16_t> narrow(all.size());
            UnpackArgs other = unpack;
            other.out = narrow.data(), other.storage = storage;
            run(UNPACK, &other);
            give("exact unpack " + name + " to " + text(storage), "u2", narrow);
        }
        std::vector<int64_t> ids{0, 1, rows - 1, rows, -1};
        std::vector<float> taken(size_t(5 * columns));
        TakeRowsArgs take{ids.data(), taken.data(), columns, 5, columns, 0, 1, {packed.segment}};
        run(TAKE_ROWS, &take);
        give("exact rows " + name, taken);
        for (const int64_t m : {1, 2, 3, 4, 7, 18}) {
            const std::vector<float> x = inputs(m * columns), bias = floats(rows);
            std::vector<float> out(size_t(m * rows));
            const MatmulArgs args{x.data(), columns, out.data(), rows, m % 2 ? nullptr : bias.data(), m, columns, 1, {packed.segment}};
            run(MATMUL, &args);
            give("product " + name + " " + text(m), out);
        }
    }
    for (const int64_t storage : {kFloat, kHalf, kBrain})
        for (const auto& [format, size] : {std::pair(2, 18), std::pair(3, 20), std::pair(8, 34)}) {
            const std::vector<uint8_t> from = stored(6 * 256, storage);
            std::vector<uint8_t> blocks(size_t(6 * 8 * size));
            const RoundArgs round{from.data(), blocks.data(), 6, 256, 64, format, storage};
            run(ROUND, &round);
            give("exact round " + text(format) + " of " + text(storage), "u1", blocks);
        }
}

void experts() {
    const int64_t hidden = 256, inner = 96, count = 5, top_k = 2, rows = 9;
    for (int64_t activation = 0; activation < 2; ++activation) {
        std::vector<Packed> parts;
        for (int64_t e = 0; e < count; ++e) {
            parts.emplace_back(FORMATS[3], 2 * inner, hidden);
            parts.emplace_back(FORMATS[7], hidden, inner);
        }
        std::vector<ExpertMatrix> gate_up(static_cast<size_t>(count)), down(static_cast<size_t>(count));
        for (size_t e = 0; e < gate_up.size(); ++e) gate_up[e] = {1, {parts[2 * e].segment}}, down[e] = {1, {parts[2 * e + 1].segment}};
        const std::vector<float> x = inputs(rows * hidden), share = floats(rows * top_k);
        std::vector<int64_t> chosen(size_t(rows * top_k));
        for (int64_t& one : chosen) one = below(count + 1);  // the last one is not there
        std::vector<float> out(x.size());
        const ExpertsArgs args{x.data(), share.data(), chosen.data(), gate_up.data(), down.data(), out.data(), hidden, hidden, rows,
                               top_k, count, hidden, inner, activation};
        run(EXPERTS, &args);
        give("experts " + text(activation), out);
    }
}

struct AttentionCase {
    int64_t storage, heads, kv_heads, k_dim, v_dim, window;
    double softcap;
    bool tree;
};

void attend(const AttentionCase& c, const std::string& name) {
    constexpr int64_t SLOTS = 16, BLOCKS = 24, N = 5, SINGLES = 3;
    const int32_t context[N] = {300, 1, 77, 130, 40}, queries[N] = {1, 1, 1, 67, 9};
    const int64_t tokens = 79, places = N * BLOCKS * SLOTS * c.kv_heads;
    std::vector<int32_t> rows(N), starts(N + 1), tables(size_t(N * BLOCKS));
    for (int32_t i = 0; i < N; ++i) rows[size_t(i)] = N - 1 - i, starts[size_t(i) + 1] = starts[size_t(i)] + queries[i];
    for (size_t i = 0; i < tables.size(); ++i) tables[i] = int32_t((i * 7) % tables.size());  // 7 has no divisor in common
    const std::vector<float> q = floats(tokens * c.heads * c.k_dim, 2);
    const std::vector<uint8_t> k = stored(places * c.k_dim, c.storage), v = stored(places * c.v_dim, c.storage);
    std::vector<uint16_t> k_scales = halves(places), v_scales = halves(places);
    for (auto* scales : {&k_scales, &v_scales})
        for (uint16_t& one : *scales) one = uint16_t(0x3c00 | (one & 0xff));  // bfloat16 of 1/128 to 1/64
    std::vector<uint8_t> tree = bytes(tokens * 67);
    for (int64_t row = SINGLES; row < N; ++row)
        for (int64_t i = 0; i < queries[row]; ++i) tree[size_t((starts[size_t(row)] + i) * 67 + i)] = 1;
    std::vector<float> out(size_t(tokens * c.heads * c.v_dim));
    AttentionArgs a{};
    a.q = q.data(), a.k = k.data(), a.v = v.data(), a.out = out.data();
    a.rows = rows.data(), a.q_start = starts.data(), a.context = context, a.tables = tables.data();
    if (c.tree) a.tree = tree.data(), a.tree_stride = 67;
    a.k_scales = k_scales.data(), a.v_scales = v_scales.data();
    a.n = N, a.singles = SINGLES;
    a.heads = c.heads, a.kv_heads = c.kv_heads, a.k_dim = c.k_dim, a.v_dim = c.v_dim, a.block_size = SLOTS;
    a.q_token = c.heads * c.k_dim, a.q_head = c.k_dim, a.out_token = c.heads * c.v_dim, a.out_head = c.v_dim;
    a.k_head = c.k_dim, a.k_slot = c.kv_heads * c.k_dim, a.k_block = SLOTS * a.k_slot;
    a.v_head = c.v_dim, a.v_slot = c.kv_heads * c.v_dim, a.v_block = SLOTS * a.v_slot;
    a.table_row = BLOCKS;
    a.k_scale_head = a.v_scale_head = 1, a.k_scale_slot = a.v_scale_slot = c.kv_heads;
    a.k_scale_block = a.v_scale_block = SLOTS * c.kv_heads;
    a.window = c.window, a.cache_storage = c.storage, a.softcap = c.softcap, a.scale = 0.125;
    run(kAttention, &a);
    give("attention " + name, out);
}

void attention() {
    int64_t number = 0;
    for (const int64_t storage : {kFloat, kHalf, kBrain, kCodes})
        for (const AttentionCase& c : {AttentionCase{storage, 8, 2, 64, 64, 0, 0, false}, AttentionCase{storage, 3, 1, 20, 13, 0, 0, true},
                                       AttentionCase{storage, 5, 5, 32, 48, 50, 0, false}, AttentionCase{storage, 6, 1, 24, 24, 0, 20, false}})
            attend(c, text(number++));
}

void elementwise() {
    constexpr int64_t ROWS = 3;
    for (const int64_t dim : {int64_t(37), int64_t(256)})
        for (const int64_t storage : {kFloat, kHalf, kBrain}) {
            const std::string name = text(dim) + " " + text(storage);
            const std::vector<float> x = floats(ROWS * dim), residual = floats(ROWS * dim);
            const std::vector<uint8_t> weight = stored(dim, storage);
            std::vector<float> total(x.size()), out(x.size());
            const NormArgs norm{x.data(), residual.data(), weight.data(), total.data(), out.data(), ROWS, dim, dim, dim, dim, dim, storage, 1e-6};
            run(kNorm, &norm);
            give("norm " + name, out);
            give("exact total " + name, total);
            const int64_t ids[ROWS] = {4, 0, 9};
            const std::vector<uint8_t> table = stored(10 * dim, storage);
            const EmbedArgs embed{ids, table.data(), out.data(), ROWS, 10, dim, dim, storage, 1.5};
            run(kEmbed, &embed);
            give("exact embed " + name, out);
        }
    const std::vector<float> wide = floats(ROWS * 202, 30), other = floats(ROWS * 202);
    for (int64_t kind = 0; kind < 2; ++kind) {
        std::vector<float> out(size_t(ROWS * 101)), mapped(wide.size());
        const ActArgs act{wide.data(), out.data(), ROWS, 101, 202, 101, kind};
        run(kActMul, &act);
        give("activation " + text(kind), out);
        const MapArgs map{wide.data(), mapped.data(), ROWS, 202, 202, 202, kind, 7.5};
        run(kMap, &map);
        give("map " + text(kind), mapped);
    }
    std::vector<float> sum(wide.size());
    const AddArgs add{wide.data(), other.data(), sum.data(), ROWS, 202, 202, 202, 202};
    run(kAdd, &add);
    give("exact add", sum);

    const int64_t vocab = 20011;
    std::vector<float> logits = floats(4 * vocab);
    logits[size_t(vocab + 9000)] = logits[size_t(vocab + 17000)] = 3;       // of equals the first
    logits[size_t(2 * vocab + 77)] = __builtin_nanf("");
    std::vector<int64_t> choice(4), on{1}, table_row{3, 0, 2, 1}, starts{0, 5, 1, 2};
    std::vector<int32_t> tokens(32);
    const ChooseArgs choose{logits.data(), choice.data(), on.data(), table_row.data(), starts.data(), tokens.data(), nullptr, 4, vocab, vocab, 8, 0};
    run(kChoose, &choose);
    give("exact choice", "i8", choice);
    give("exact tokens", "i4", tokens);
}

void rope() {
    constexpr int64_t TOKENS = 5, HEADS = 4, KV = 2, BLOCK = 8, BLOCKS = 3, POSITIONS = 40;
    for (const int64_t storage : {kFloat, kHalf, kBrain, kCodes})
        for (const int64_t dim : {int64_t(64), int64_t(20)}) {
            const int64_t rotated = dim == 20 ? 12 : dim, width = storage == kFloat ? 4 : storage == kCodes ? 1 : 2;
            std::vector<float> q = floats(TOKENS * HEADS * dim);
            const std::vector<float> k = floats(TOKENS * KV * dim), v = floats(TOKENS * KV * dim), table = floats(POSITIONS * rotated);
            const std::vector<uint8_t> q_norm = stored(dim, kBrain), k_norm = stored(dim, kBrain);
            const std::vector<int64_t> positions{0, 7, 39, 12, 3}, slots{23, 0, -1, 8, 9};
            std::vector<uint8_t> k_cache(size_t(BLOCKS * BLOCK * KV * dim * width)), v_cache(k_cache.size());
            std::vector<uint16_t> k_scales(size_t(BLOCKS * BLOCK * KV)), v_scales(k_scales.size());
            RopeArgs a{};
            a.q = q.data(), a.k = k.data(), a.v = v.data(), a.table = table.data();
            a.positions = positions.data(), a.slots = slots.data(), a.k_cache = k_cache.data(), a.v_cache = v_cache.data();
            a.q_norm = q_norm.data(), a.k_norm = k_norm.data(), a.k_scales = k_scales.data(), a.v_scales = v_scales.data();
            a.tokens = TOKENS, a.heads = HEADS, a.kv_heads = KV, a.dim = a.v_dim = dim, a.rotated = rotated, a.block_size = BLOCK;
            a.q_token = HEADS * dim, a.k_token = a.v_token = KV * dim, a.q_head = a.k_head = a.v_head = dim;
            a.k_cache_head = a.v_cache_head = dim, a.k_slot = a.v_slot = KV * dim, a.k_block = a.v_block = BLOCK * KV * dim;
            a.k_scale_head = a.v_scale_head = 1, a.k_scale_slot = a.v_scale_slot = KV, a.k_scale_block = a.v_scale_block = BLOCK * KV;
            a.cache_storage = storage, a.norm_storage = kBrain, a.eps = 1e-6;
            run(kRope, &a);
            const std::string name = text(storage) + " " + text(dim);
            const char* type = storage == kFloat ? "f4" : storage == kHalf ? "f2" : storage == kBrain ? "b2" : "i1";
            give("rope " + name, q);
            std::printf("keys %s %s %zu\n", name.c_str(), type, k_cache.size() / size_t(width));
            std::fwrite(k_cache.data(), 1, k_cache.size(), stdout);
            std::printf("exact values %s %s %zu\n", name.c_str(), type, v_cache.size() / size_t(width));
            std::fwrite(v_cache.data(), 1, v_cache.size(), stdout);
            give("exact scales " + name, "u2", v_scales);
        }
}

void other_products() {
    for (const int64_t storage : {kFloat, kHalf, kBrain}) {
        const int64_t tokens = 7, columns = 75, rows = 90, rank = 6;
        const std::vector<float> x = floats(tokens * columns);
        std::vector<float> out = floats(tokens * rows);
        const std::vector<int64_t> adapter{0, 0, 1, -1, 1, 1, 0}, ranks{6, 5};
        const std::vector<uint8_t> down = stored(2 * 2 * rank * columns, storage), up = stored(2 * rank * rows, storage);
        const LowRankArgs a{x.data(), out.data(), adapter.data(), down.data(), up.data(), ranks.data(), tokens, columns, rows, rank, 2,
                            columns, rows, storage, {50, 90, 90}};
        run(kLowRank, &a);
        give("low rank " + text(storage), out);
    }
    for (int64_t transposed = 0; transposed < 2; ++transposed) {
        const int64_t rows = 6, heads = 3, n = 29, k = 21;
        const std::vector<float> x = floats(rows * heads * k), weight = floats(heads * n * k), beside = floats(rows * heads * 5);
        std::vector<float> out(size_t(rows * heads * (n + 5)));
        const HeadsArgs a{x.data(), weight.data(), beside.data(), out.data(), rows, heads, n, k, transposed, 5, heads * k, k, heads * 5, 5,
                          heads * (n + 5), n + 5};
        run(HEADS, &a);
        give("heads " + text(transposed), out);
    }
    const int64_t rows = 6, hidden = 70, count = 24;
    const std::vector<float> x = floats(rows * hidden), router = floats(count * hidden);
    std::vector<float> shares(size_t(rows * 3));
    std::vector<int64_t> chosen(shares.size());
    const RouteArgs a{x.data(), router.data(), shares.data(), chosen.data(), rows, hidden, count, hidden, 3, 4, 2, 1, 2.5};
    run(ROUTE, &a);
    give("shares", shares);
    give("exact chosen", "i8", chosen);
}

void checksums() {
    const std::vector<uint8_t> data = bytes(40000);
    std::vector<uint32_t> sums;
    for (const size_t size : {size_t(0), size_t(1), size_t(9), size_t(13000), size_t(40000)})
        for (const int plain : {0, 1}) sums.push_back(tm_crc32c(data.data() + 1, size ? size - 1 : 0, plain));
    give("exact checksums", "u4", sums);
}

}  // namespace

int main(int count, char** given) {
    if (count != 3) return 2;
    const int level = std::atoi(given[1]);
    if (tm_set_level(level) != level) {
        std::fprintf(stderr, "this CPU has no level %d\n", level);
        return 3;
    }
    tm_pool_resize(std::atoi(given[2]));
    matrices();
    experts();
    attention();
    elementwise();
    rope();
    other_products();
    checksums();
}
