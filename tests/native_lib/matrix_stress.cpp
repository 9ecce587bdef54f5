// Packs, unpacks, rounds and multiplies blocks of random bytes on heap memory of exactly the right size, at every CPU level and from
// several threads at once. Built with sanitizers by test_native_formats.py; prints "ok".
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "matrix.h"

extern "C" {
void tm_pool_resize(int threads);
int tm_run(uint32_t kind, const void* args);
int tm_set_level(int level);
int tm_best_level();
}

namespace {

using namespace mill;

struct Format {
    int64_t number, values, bytes, form, book;
};
constexpr Format FORMATS[] = {
    {0, 1, 4, F32, 0},           {1, 1, 2, F16, 0},           {30, 1, 2, BF16, 0},         {2, 32, 18, INT4, 0},
    {3, 32, 20, INT4_MIN, 0},    {6, 32, 22, INT5, 0},        {7, 32, 24, INT5_MIN, 0},    {8, 32, 34, INT8, 0},
    {10, 256, 84, F32, 0},       {11, 256, 110, INT6_K, 0},   {12, 256, 144, INT4_K, 0},   {13, 256, 176, INT5_K, 0},
    {14, 256, 210, INT6_K, 0},   {16, 256, 66, INT8_K, 2048}, {17, 256, 74, INT8_K, 4096}, {18, 256, 98, INT8_K, 1024},
    {19, 256, 50, INT8_K, 16384}, {20, 32, 18, INT8, 0},      {21, 256, 110, INT6_K, 2048}, {22, 256, 82, INT8_K, 8192},
    {23, 256, 136, INT8_K, 0},   {29, 256, 56, INT8_K, 16384}, {34, 256, 54, INT4, 0},     {35, 256, 66, INT4, 0},
    {39, 32, 17, F32, 0},        {40, 64, 36, F32, 0},
};

template <class T>
struct Exact {  // heap memory that ends where it says, aligned as a packed matrix is
    T* data;
    size_t count;
    explicit Exact(size_t count) : data(nullptr), count(count) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, count * sizeof(T))) abort();
        data = static_cast<T*>(memory);
    }
    Exact(const Exact&) = delete;
    ~Exact() { free(data); }
};

void check(bool fine, const char* what) {
    if (fine) return;
    std::printf("%s\n", what);
    std::exit(1);
}

void one(const Format& format, int64_t rows, int64_t columns, int64_t m, unsigned seed) {
    std::mt19937 random(seed);
    const int64_t form = format.form;
    Exact<uint8_t> raw(static_cast<size_t>(rows * columns / format.values * format.bytes));
    for (size_t i = 0; i < raw.count; ++i) raw.data[i] = static_cast<uint8_t>(random());
    Exact<uint8_t> panels(static_cast<size_t>((rows + PANEL - 1) / PANEL * panel_bytes(form, columns)));
    Exact<int32_t> order(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) order.data[i] = static_cast<int32_t>(rows - 1 - i);
    Exact<uint8_t> book(static_cast<size_t>(format.book));
    for (size_t i = 0; i < book.count; ++i) book.data[i] = static_cast<uint8_t>(1 + random() % 15);
    RepackArgs repack{raw.data, order.data, book.data, panels.data, rows, columns, format.number};
    check(tm_run(REPACK, &repack) == 0, "repack");
    Exact<float> floats(static_cast<size_t>(rows * columns));
    for (int64_t storage = 2; storage >= 0; --storage) {  // last, as floats
        UnpackArgs unpack{raw.data, order.data, book.data, floats.data, rows, columns, format.number, storage};
        check(tm_run(UNPACK, &unpack) == 0, "unpack");
    }
    if (columns % 64 == 0)
        for (const Format& to : {FORMATS[3], FORMATS[4], FORMATS[7]}) {
            Exact<uint8_t> blocks(static_cast<size_t>(rows * columns / to.values * to.bytes));
            RoundArgs round{floats.data, blocks.data, rows, columns, 64, to.number, 0};
            check(tm_run(ROUND, &round) == 0, "round");
        }

    Exact<float> x(static_cast<size_t>(m * columns)), out(static_cast<size_t>(m * rows)), again(out.count);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < x.count; ++i) x.data[i] = normal(random);
    if (m > 2) x.data[2 * columns] = NAN;
    MatmulArgs args{};
    args.x = x.data, args.x_stride = columns, args.out = out.data, args.out_stride = rows, args.m = m, args.k = columns;
    args.num_segments = 1;
    args.segments[0] = {panels.data, rows, form};
    check(tm_run(MATMUL, &args) == 0, "matmul");
    for (int64_t row = 0; row < m; ++row) {  // one by one, as all together
        args.x = x.data + row * columns, args.out = again.data + row * rows, args.m = 1;
        tm_run(MATMUL, &args);
    }
    for (size_t i = 0; i < out.count; ++i)
        check(out.data[i] == again.data[i] || (std::isnan(out.data[i]) && std::isnan(again.data[i])), "rows differ");

    Exact<int64_t> ids(3);
    ids.data[0] = 0, ids.data[1] = rows - 1, ids.data[2] = rows;
    Exact<float> taken(static_cast<size_t>(3 * columns));
    TakeRowsArgs take{};
    take.ids = ids.data, take.out = taken.data, take.out_stride = columns, take.m = 3, take.k = columns;
    take.num_segments = 1;
    take.segments[0] = args.segments[0];
    check(tm_run(TAKE_ROWS, &take) == 0, "take");
    check(taken.data[2 * columns] == 0, "a row that is not there");
}

}  // namespace

int main() {
    const int64_t shapes[][3] = {{1, 256, 1}, {16, 256, 2}, {17, 512, 5}, {40, 256, 23}, {33, 768, 70}};
    for (int level = 0; level <= tm_best_level(); ++level) {
        tm_set_level(level);
        for (int threads = 1; threads <= 3; ++threads) {
            tm_pool_resize(threads);
            std::vector<std::thread> callers;
            for (unsigned caller = 0; caller < 2; ++caller)
                callers.emplace_back([&shapes, caller] {
                    for (const Format& format : FORMATS) {
                        for (const auto& shape : shapes) one(format, shape[0], shape[1], shape[2], caller);
                        if (format.values <= 32) one(format, 19, 96, 3, caller);
                        if (format.values == 1) one(format, 19, 7, 18, caller);
                    }
                });
            for (auto& caller : callers) caller.join();
        }
    }
    std::printf("ok\n");
}
