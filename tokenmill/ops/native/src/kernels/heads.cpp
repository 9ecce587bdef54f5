// Products of every head with a matrix of its own, as latent attention has them before and behind its keys.
//
// A row's result is computed by the same operations in the same order whatever other rows and threads there are.
#include "routing.h"

#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {
namespace {

constexpr int AT_ONCE = 4;  // rows, and vectors or outputs of each

// out[row][n] = sum over k of x[row][k] * weight[k][n], for N vectors of n.
template <int ROWS, int N>
void sums_of_rows(const HeadsArgs& a, const float* x, const float* weight, float* out) {
    Vec sums[ROWS][N] = {};
    for (int64_t k = 0; k < a.columns; k++)
        for (int n = 0; n < N; n++) {
            const Vec some = load(weight + k * a.rows_of_weight + n * W);
            for (int row = 0; row < ROWS; row++) sums[row][n] += some * x[row * a.x_stride + k];
        }
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++) store(out + row * a.out_stride + n * W, sums[row][n]);
}

// out[row][n] = sum over k of x[row][k] * weight[n][k], for N rows of the weight.
template <int ROWS, int N>
void dots(const HeadsArgs& a, const float* x, const float* weight, float* out) {
    Vec sums[ROWS][N] = {};
    int64_t k = 0;
    for (; k + W <= a.columns; k += W)
        for (int n = 0; n < N; n++) {
            const Vec some = load(weight + n * a.columns + k);
            for (int row = 0; row < ROWS; row++) sums[row][n] += some * load(x + row * a.x_stride + k);
        }
    for (int row = 0; row < ROWS; row++)
        for (int n = 0; n < N; n++) {
            float total = sum(sums[row][n]);
            for (int64_t i = k; i < a.columns; i++) total += x[row * a.x_stride + i] * weight[n * a.columns + i];
            out[row * a.out_stride + n] = total;
        }
}

template <int ROWS>
void multiply(const HeadsArgs& a, const float* x, const float* weight, float* out) {
    int64_t n = 0;
    if (!a.transposed) {
        for (; n + AT_ONCE <= a.rows_of_weight; n += AT_ONCE) dots<ROWS, AT_ONCE>(a, x, weight + n * a.columns, out + n);
        for (; n < a.rows_of_weight; n++) dots<ROWS, 1>(a, x, weight + n * a.columns, out + n);
        return;
    }
    for (; n + AT_ONCE * W <= a.rows_of_weight; n += AT_ONCE * W) sums_of_rows<ROWS, AT_ONCE>(a, x, weight + n, out + n);
    for (; n + W <= a.rows_of_weight; n += W) sums_of_rows<ROWS, 1>(a, x, weight + n, out + n);
    for (; n < a.rows_of_weight; n++)
        for (int row = 0; row < ROWS; row++) {
            float total = 0;
            for (int64_t k = 0; k < a.columns; k++) total += weight[k * a.rows_of_weight + n] * x[row * a.x_stride + k];
            out[row * a.out_stride + n] = total;
        }
}

void heads(const void* args, Team& team) {
    const HeadsArgs& a = *static_cast<const HeadsArgs*>(args);
    const int64_t rows = rows_of(a.rows, team.rows), parts = (rows + AT_ONCE - 1) / AT_ONCE;
    int64_t begin, end;
    team.share(a.heads * parts, begin, end);
    for (int64_t unit = begin; unit < end; unit++) {  // all rows of a head, whose matrix stays in a near cache
        const int64_t head = unit / parts, first = unit % parts * AT_ONCE;
        const float* x = a.x + first * a.x_stride + head * a.x_head;
        const float* weight = a.weight + head * a.rows_of_weight * a.columns;
        float* out = a.out + first * a.out_stride + head * a.out_head;
        for (int64_t row = first; row < rows && row < first + AT_ONCE && a.width_beside; row++)
            std::memcpy(out + (row - first) * a.out_stride, a.beside + row * a.beside_stride + head * a.beside_head,
                        size_t(a.width_beside) * sizeof(float));
        out += a.width_beside;
        if (rows - first >= AT_ONCE) {
            multiply<AT_ONCE>(a, x, weight, out);
            continue;
        }
        for (int64_t row = 0; row < rows - first; row++)
            multiply<1>(a, x + row * a.x_stride, weight, out + row * a.out_stride);
    }
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(heads)[] = {
    {HEADS, sizeof(HeadsArgs), TM_NS::heads, nullptr},
    {},
};

}  // namespace mill
