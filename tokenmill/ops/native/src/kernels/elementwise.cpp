// Norms, rotary embedding with the write to the cache, activations, embedding lookup and greedy choice.
#include "elementwise.h"

#include "activation.h"
#include "codes.h"
#include "ops.h"
#include "vec.h"

namespace mill {
namespace TM_NS {
namespace {

struct Span {
    int64_t begin, end;
};

Span share_of(int64_t items, const Team& team) {
    Span mine;
    team.share(items, mine.begin, mine.end);
    return mine;
}

float inverse_length(const float* x, int64_t dim, float eps) {
    Vec squares = {}, more = {};
    int64_t i = 0;
    for (; i + 2 * W <= dim; i += 2 * W) {
        Vec a = load(x + i), b = load(x + i + W);
        squares += a * a;
        more += b * b;
    }
    for (; i + W <= dim; i += W) squares += load(x + i) * load(x + i);
    float total = sum(squares + more);
    for (; i < dim; i++) total += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(total / float(dim) + eps);
}

template <class T>
void scale_by(const float* x, const T* weight, float factor, float* out, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(out + i, load(x + i) * factor * load_wide(weight + i));
    for (; i < dim; i++) out[i] = x[i] * factor * widen(weight[i]);
}

// out = x * factor * weight; out may be x.
void scale_by(const float* x, const void* weight, int64_t storage, float factor, float* out, int64_t dim) {
    if (storage == kFloat) scale_by(x, (const float*)weight, factor, out, dim);
    if (storage == kHalf) scale_by(x, (const Half*)weight, factor, out, dim);
    if (storage == kBrain) scale_by(x, (const Brain*)weight, factor, out, dim);
}

void add(const float* x, const float* y, float* out, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(out + i, load(x + i) + load(y + i));
    for (; i < dim; i++) out[i] = x[i] + y[i];
}

void norm(const NormArgs& a, Team& team) {
    Span mine = share_of(rows_of(a.rows, team.rows), team);
    for (int64_t row = mine.begin; row < mine.end; row++) {
        const float* x = a.x + row * a.x_stride;
        if (a.residual) {
            float* total = a.total + row * a.total_stride;
            add(x, a.residual + row * a.residual_stride, total, a.dim);
            x = total;
        }
        scale_by(x, a.weight, a.weight_storage, inverse_length(x, a.dim, float(a.eps)), a.out + row * a.out_stride, a.dim);
    }
}

// Turn the pairs (x[i], x[i + half]); the rest of the dims is copied. out may be x.
template <class T>
void rotate(const float* x, const float* table, int64_t half, int64_t dim, T* out) {
    const float *cosines = table, *sines = table + half;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        Vec left = load(x + i), right = load(x + half + i), c = load(cosines + i), s = load(sines + i);
        store_narrow(out + i, left * c - right * s);
        store_narrow(out + half + i, right * c + left * s);
    }
    for (; i < half; i++) {
        float left = x[i], right = x[half + i];
        narrow(left * cosines[i] - right * sines[i], out + i);
        narrow(right * cosines[i] + left * sines[i], out + half + i);
    }
    for (i = 2 * half; i < dim; i++) narrow(x[i], out + i);
}

constexpr int64_t kMaxNormedHead = 1024;  // the Python side asks for no more

template <class T>
void rope_key(const RopeArgs& a, int64_t token, int64_t head, const float* angles) {
    int64_t slot = a.slots[token];
    if (slot < 0) return;
    int64_t block = slot / a.block_size, offset = slot % a.block_size;
    const float* k = a.k + token * a.k_token + head * a.k_head;
    float normed[kMaxNormedHead];
    if (a.k_norm) {
        scale_by(k, a.k_norm, a.norm_storage, inverse_length(k, a.dim, float(a.eps)), normed, a.dim);
        k = normed;
    }
    T* k_to = (T*)a.k_cache + block * a.k_block + offset * a.k_slot + head * a.k_cache_head;
    if constexpr (scaled<T>) {
        float turned[kMaxNormedHead];
        rotate(k, angles, a.rotated / 2, a.dim, turned);
        write_codes(turned, a.dim, k_to,
                    (Brain*)a.k_scales + block * a.k_scale_block + offset * a.k_scale_slot + head * a.k_scale_head);
    } else {
        rotate(k, angles, a.rotated / 2, a.dim, k_to);
    }
    if (!a.v) return;
    const float* v = a.v + token * a.v_token + head * a.v_head;
    T* v_to = (T*)a.v_cache + block * a.v_block + offset * a.v_slot + head * a.v_cache_head;
    if constexpr (scaled<T>) {
        write_codes(v, a.v_dim, v_to,
                    (Brain*)a.v_scales + block * a.v_scale_block + offset * a.v_scale_slot + head * a.v_scale_head);
    } else {
        int64_t i = 0;
        for (; i + W <= a.v_dim; i += W) store_narrow(v_to + i, load(v + i));
        for (; i < a.v_dim; i++) narrow(v[i], v_to + i);
    }
}

void rope(const RopeArgs& a, Team& team) {
    int64_t heads = a.heads + a.kv_heads;
    Span mine = share_of(rows_of(a.tokens, team.rows) * heads, team);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        int64_t token = unit / heads, head = unit % heads;
        const float* angles = a.table + a.positions[token] * a.rotated;
        if (head < a.heads) {
            float* q = a.q + token * a.q_token + head * a.q_head;
            if (a.q_norm) scale_by(q, a.q_norm, a.norm_storage, inverse_length(q, a.dim, float(a.eps)), q, a.dim);
            rotate(q, angles, a.rotated / 2, a.rotated, q);
            continue;
        }
        head -= a.heads;
        if (a.cache_storage == kFloat) rope_key<float>(a, token, head, angles);
        if (a.cache_storage == kHalf) rope_key<Half>(a, token, head, angles);
        if (a.cache_storage == kBrain) rope_key<Brain>(a, token, head, angles);
        if (a.cache_storage == kCodes) rope_key<int8_t>(a, token, head, angles);
    }
}

void act_mul(const ActArgs& a, Team& team) {
    constexpr int64_t kColumns = 256;
    int64_t parts = (a.inner + kColumns - 1) / kColumns;
    Span mine = share_of(rows_of(a.rows, team.rows) * parts, team);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        int64_t row = unit / parts, at = unit % parts * kColumns;
        int64_t n = a.inner - at < kColumns ? a.inner - at : kColumns;
        const float* gate = a.x + row * a.x_stride + at;
        float* out = a.out + row * a.out_stride + at;
        if (a.kind == 0) gated<silu>(gate, gate + a.inner, out, n);
        if (a.kind == 1) gated<gelu_tanh>(gate, gate + a.inner, out, n);
    }
}

// out = row * scale; out may be row.
template <class T>
void times(const T* row, float scale, float* out, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(out + i, load_wide(row + i) * scale);
    for (; i < dim; i++) out[i] = widen(row[i]) * scale;
}

void embed(const EmbedArgs& a, Team& team) {
    Span mine = share_of(rows_of(a.rows, team.rows), team);
    for (int64_t row = mine.begin; row < mine.end; row++) {
        int64_t id = a.ids[row];
        float* out = a.out + row * a.out_stride;
        if (id < 0 || id >= a.vocab) {  // never asked for; not a number ends the request, a wild read would end us all
            for (int64_t i = 0; i < a.dim; i++) out[i] = __builtin_nanf("");
            continue;
        }
        if (a.table_storage == kFloat) times((const float*)a.table + id * a.dim, float(a.scale), out, a.dim);
        if (a.table_storage == kHalf) times((const Half*)a.table + id * a.dim, float(a.scale), out, a.dim);
        if (a.table_storage == kBrain) times((const Brain*)a.table + id * a.dim, float(a.scale), out, a.dim);
    }
}

void add_rows(const AddArgs& a, Team& team) {
    Span mine = share_of(rows_of(a.rows, team.rows), team);
    for (int64_t row = mine.begin; row < mine.end; row++)
        add(a.x + row * a.x_stride, a.y + row * a.y_stride, a.out + row * a.out_stride, a.dim);
}

// value * tanh(x / value); out may be x.
void soft_cap(const float* x, float value, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, hyperbolic_tangent(load(x + i) / value) * value);
    if (i == n) return;
    float rest[W] = {};
    for (int64_t j = i; j < n; j++) rest[j - i] = x[j];
    Vec done = hyperbolic_tangent(load(rest) / value) * value;
    for (int64_t j = i; j < n; j++) out[j] = done[j - i];
}

void map(const MapArgs& a, Team& team) {
    constexpr int64_t kColumns = 4096;  // of logits, one row is enough for all threads
    int64_t parts = (a.dim + kColumns - 1) / kColumns;
    Span mine = share_of(rows_of(a.rows, team.rows) * parts, team);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        int64_t row = unit / parts, at = unit % parts * kColumns;
        int64_t n = a.dim - at < kColumns ? a.dim - at : kColumns;
        const float* x = a.x + row * a.x_stride + at;
        float* out = a.out + row * a.out_stride + at;
        if (a.kind == 0) times(x, float(a.value), out, n);
        if (a.kind == 1) soft_cap(x, float(a.value), out, n);
    }
}

void decode_inputs(const DecodeInputArgs& a, Team& team) {
    Span mine = share_of(rows_of(a.n, team.rows), team);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        int64_t row = a.rows[i], start = a.starts[i];
        a.ids[i] = a.tokens[row * a.token_stride + start];
        a.slots[i] = a.blocks[row * a.block_stride + start / a.block_size] * a.block_size + start % a.block_size;
        a.table_rows[i] = int32_t(row);
        a.context[i] = int32_t(start + 1);
    }
}

// The first largest of some logits; not a number wins over everything, as it does in torch.
Best best_of(const float* logits, int64_t n) {
    Vec top = all(-__builtin_inff());
    Ints wrong = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        Vec x = load(logits + i);
        top = larger(x, top);
        wrong |= x != x;
    }
    float value = max_lane(top);
    bool has_nan = false;
    for (int lane = 0; lane < W; lane++) has_nan |= wrong[lane] != 0;
    for (; i < n; i++) {
        has_nan |= logits[i] != logits[i];
        if (logits[i] > value) value = logits[i];
    }
    if (has_nan) return {__builtin_nanf(""), 0};
    const Vec wanted = all(value);
    for (i = 0; i + W <= n; i += W) {
        Ints same = load(logits + i) == wanted;
        int32_t any = 0;
        for (int lane = 0; lane < W; lane++) any |= same[lane];
        if (any) break;
    }
    while (i < n && logits[i] != value) i++;
    return {value, i};
}

constexpr int64_t kPart = 8192;  // logits that one thread looks at in one go

size_t choose_scratch(const void* args, int64_t rows) {
    const auto& a = *static_cast<const ChooseArgs*>(args);
    return size_t(rows_of(a.rows, rows) * ((a.vocab + kPart - 1) / kPart)) * sizeof(Best);
}

// The largest of several; not a number wins, and of equals the first.
Best first_of(const Best* found, int64_t count, int64_t stride) {
    Best best = found[0];
    for (int64_t i = 1; i < count; i++) {
        const Best& other = found[i * stride];
        if (best.value != best.value) break;
        if (other.value > best.value || other.value != other.value) best = other;
    }
    return best;
}

template <class Args>
void write_choice(const Args& a, int64_t row, const Best& best) {
    const int64_t at = __builtin_isfinite(best.value) ? best.at : -1;
    a.out[row] = at;
    if (a.tokens) a.tokens[a.table_row[row] * a.token_stride + a.starts[row] + 1] = int32_t(at < 0 ? 0 : at);
}

void choose(const ChooseArgs& a, Team& team) {
    if (a.on && !*a.on) return;
    int64_t rows = rows_of(a.rows, team.rows), parts = (a.vocab + kPart - 1) / kPart;
    Best* found = reinterpret_cast<Best*>(team.scratch());  // [rows, parts]
    Span mine = share_of(rows * parts, team);
    for (int64_t unit = mine.begin; unit < mine.end; unit++) {
        int64_t row = unit / parts, first = unit % parts * kPart;
        int64_t n = a.vocab - first < kPart ? a.vocab - first : kPart;
        found[unit] = best_of(a.logits + row * a.stride + first, n);
        found[unit].at += first;
    }
    team.barrier();
    mine = share_of(rows, team);
    for (int64_t row = mine.begin; row < mine.end; row++) {
        const Best best = first_of(found + row * parts, parts, 1);
        if (a.bests)
            a.bests[row] = {best.value, best.at + a.first};
        else
            write_choice(a, row, best);
    }
}

void pick(const PickArgs& a, Team& team) {
    if (a.on && !*a.on) return;
    Span mine = share_of(rows_of(a.rows, team.rows), team);
    for (int64_t row = mine.begin; row < mine.end; row++)
        write_choice(a, row, first_of(a.bests + row, a.ranks, a.rank_stride));
}

template <class Args, void (*op)(const Args&, Team&)>
void call(const void* args, Team& team) {
    op(*static_cast<const Args*>(args), team);
}

template <class Args, void (*op)(const Args&, Team&)>
constexpr OpEntry entry(uint32_t kind, size_t (*scratch)(const void*, int64_t) = nullptr) {
    return {kind, sizeof(Args), call<Args, op>, scratch};
}

}  // namespace
}  // namespace TM_NS

extern const OpEntry TM_OPS(elementwise)[] = {
    TM_NS::entry<NormArgs, TM_NS::norm>(kNorm),
    TM_NS::entry<RopeArgs, TM_NS::rope>(kRope),
    TM_NS::entry<ActArgs, TM_NS::act_mul>(kActMul),
    TM_NS::entry<EmbedArgs, TM_NS::embed>(kEmbed),
    TM_NS::entry<AddArgs, TM_NS::add_rows>(kAdd),
    TM_NS::entry<MapArgs, TM_NS::map>(kMap),
    TM_NS::entry<DecodeInputArgs, TM_NS::decode_inputs>(kDecodeInputs),
    TM_NS::entry<ChooseArgs, TM_NS::choose>(kChoose, TM_NS::choose_scratch),
    TM_NS::entry<PickArgs, TM_NS::pick>(kPick),
    {},
};

}  // namespace mill
