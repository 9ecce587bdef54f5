// How matrices lie in memory for the kernels: panels of 16 rows, chunk by chunk of their columns.
//
// A panel is read from end to end. It is cut into chunks of a few groups of 32 columns; the scales of a chunk come first,
// then the codes of its groups. In a plane of whole bytes, byte 4 * row + i of the vector of 64 bytes number j is column
// 4 * j + i of its group: four neighbouring columns of each of 16 rows, which is what one instruction multiplies with
// four broadcast inputs. Fewer bits lie in several planes:
//   low 4 bits   4 vectors; vector j holds columns 4 j + i in its low and 16 + 4 j + i in its high nibbles
//   5th bit      8 words of 64 bits; bit 4 * row + i of word j is column 4 j + i
//   5th and 6th  2 vectors; bits 2 f and 2 f + 1 of vector h belong to vector j = 4 h + f
// Codes are unsigned. A weight is scale * (code - ZERO), or scale * code + minimum. The scales of a chunk are
//   SYMMETRIC    f16 scale[2 groups][16]
//   MINIMUM      f16 scale[16], f16 minimum[16]                                 (of its one group)
// or, where a chunk is 256 columns and small integers multiply the floats,
//   K_MINIMUM    f16 d[16], f16 dmin[16], u8 scale[8][16], u8 minimum[8][16]    (minimum is subtracted)
//   K_SIXTEENTHS f16 d[16], 32 unused bytes, i8 scale[16][16]                   (of 16 columns each)
//                with codes of 8 bits: f32 d[16], i8 scale[16][16]
// Dense matrices are [K][16 rows] of their type. Rows that a matrix lacks are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mill {

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int SUPER = 256;

enum Scales { SYMMETRIC, MINIMUM, K_MINIMUM, K_SIXTEENTHS };

enum Form : int32_t {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
    INT4 = 3,      // Q4_0
    INT4_MIN = 4,  // Q4_1
    INT4_K = 5,    // Q4_K
    INT5 = 6,      // Q5_0
    INT5_MIN = 7,  // Q5_1
    INT5_K = 8,    // Q5_K
    INT6_K = 9,    // Q6_K
    INT8 = 10,     // Q8_0
    INT8_K = 11,   // what takes its values from a book
    FORMS = 12,
};

constexpr bool is_dense(int form) { return form <= BF16; }

template <int BITS_, Scales SCALES_>
struct Codes {
    static constexpr int BITS = BITS_;
    static constexpr Scales SCALES = SCALES_;
    static constexpr int ZERO_SHIFT = BITS - 1;  // ZERO is half of the range
    static constexpr bool HAS_ZERO = SCALES == SYMMETRIC || SCALES == K_SIXTEENTHS;
    static constexpr bool FLOAT_D = BITS == 8 && SCALES == K_SIXTEENTHS;  // an eighth of an f16 need not be one
    static constexpr int GROUP_BYTES = PANEL * GROUP * BITS / 8;
    static constexpr int CHUNK = SCALES == SYMMETRIC ? 2 : SCALES == MINIMUM ? 1 : SUPER / GROUP;  // groups
    static constexpr int SCALE_BYTES = SCALES <= MINIMUM ? 64 : 320;                               // of a chunk
    static constexpr int CHUNK_BYTES = SCALE_BYTES + CHUNK * GROUP_BYTES;

    static constexpr int64_t scales_at(int64_t g) { return g / CHUNK * CHUNK_BYTES; }
    static constexpr int64_t codes_at(int64_t g) { return scales_at(g) + SCALE_BYTES + g % CHUNK * GROUP_BYTES; }
    static constexpr int64_t panel_bytes(int64_t columns) {
        const int64_t groups = columns / GROUP;
        return (groups + CHUNK - 1) / CHUNK * SCALE_BYTES + groups * GROUP_BYTES;
    }
};

using Int4 = Codes<4, SYMMETRIC>;
using Int4Min = Codes<4, MINIMUM>;
using Int4K = Codes<4, K_MINIMUM>;
using Int5 = Codes<5, SYMMETRIC>;
using Int5Min = Codes<5, MINIMUM>;
using Int5K = Codes<5, K_MINIMUM>;
using Int6K = Codes<6, K_SIXTEENTHS>;
using Int8 = Codes<8, SYMMETRIC>;
using Int8K = Codes<8, K_SIXTEENTHS>;

// In the scales of 256 columns: where the small integers begin, and the minimums among them.
constexpr int SMALL_AT = 4 * PANEL;
constexpr int SMALL_MINIMUMS_AT = SMALL_AT + 8 * PANEL;

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Columns that a matrix of this form must be a multiple of.
constexpr int64_t column_step(int form) {
    return is_dense(form) ? 1 : form == INT4_K || form == INT5_K || form == INT6_K || form == INT8_K ? SUPER : GROUP;
}

// Calls visit(Codes) with the type of a quantized form.
template <class Visit>
constexpr auto with_codes(int64_t form, Visit visit) {
    switch (form) {
        case INT4: return visit(Int4{});
        case INT4_MIN: return visit(Int4Min{});
        case INT4_K: return visit(Int4K{});
        case INT5: return visit(Int5{});
        case INT5_MIN: return visit(Int5Min{});
        case INT5_K: return visit(Int5K{});
        case INT6_K: return visit(Int6K{});
        case INT8_K: return visit(Int8K{});
        default: return visit(Int8{});
    }
}

constexpr int64_t panel_bytes(int64_t form, int64_t columns) {
    if (is_dense(static_cast<int>(form))) return round_up(columns * PANEL * (form == F32 ? 4 : 2), 64);
    return with_codes(form, [columns](auto codes) { return codes.panel_bytes(columns); });
}

// Where few rows are multiplied, memory is the limit: fetch what comes a little later, in the next panels, too.
constexpr int64_t FETCH_AHEAD = 8192;
template <class C>
static inline void prefetch(const uint8_t* chunk) {
    for (int line = 0; line < C::CHUNK_BYTES; line += 64) __builtin_prefetch(chunk + FETCH_AHEAD + line, 0, 3);
}

// 32 quantized inputs: x = d * q, |q| <= 127. The sums serve the terms of a weight that do not depend on its code.
struct InputBlock {
    int8_t q[GROUP];
    float d;
    float sum;           // of the inputs as quantized, with their outliers
    int32_t minus_sum;   // - sum of q
    int32_t minus_half;  // - sum of the first 16
};
static_assert(sizeof(InputBlock) == 48, "kernels address its fields by broadcast loads");

// Where one input is large among those of its row, it would cost its whole block precision: it is taken out, zero in its
// block, and multiplied as it is. These products are added when all others of a row have been: most blocks have none,
// and the loop over all of them has no branch. Rows tend to have their outliers in the same columns.
constexpr int QUAD = 4;
struct Outlier {
    uint32_t group;
    uint32_t column;  // in its group
    uint32_t vector;  // of the four with low bits, where its codes are: bytes from the first
    uint32_t shift;   // bits in each of that vector's words before its code
    float x[QUAD];    // of the rows of a quad; 0 where it is none
};

// An input is taken out if its square is more than so many times the mean of the largest squares of its row's blocks.
// With the default model that is about one in 150 (docs/performance.md: what other limits cost).
constexpr float OUTLIER_ABOVE = 1.25f;
constexpr int MOST_OUTLIERS = 2;  // of a block
constexpr int64_t most_outliers(int64_t groups) { return QUAD * MOST_OUTLIERS * groups; }  // of a quad

// Tiles of up to TILE rows: block (group g, row r) of a tile of n rows is number g * n + r.
constexpr int TILE = 16;
struct Inputs {
    InputBlock* blocks;
    Outlier* outliers;  // [quad][most_outliers]
    int64_t* taken;     // [quad] how many there are
    float* floats;      // for dense matrices: column k of row r is number k * n + r
};

// The rows of a tile that a kernel takes.
struct Rows {
    const InputBlock* blocks;  // of the first row's group 0
    int64_t stride;            // to the next group's
    int first;                 // row in its quad
    const Outlier* outliers;   // of its quad
    const int64_t* taken;
    int64_t room;  // outliers from quad to quad
};

constexpr float LARGEST = 3.402823466e38f;  // finite float
constexpr float SMALLEST = 1e-30f;          // blocks of smaller values are zero

// Inputs that are not finite make every product with them NaN, which the sampler reports.
static inline void spoil(InputBlock& out) {
    out = InputBlock{};
    out.d = out.sum = __builtin_nanf("");
}

// Some rows of a matrix, in one form.
struct Segment {
    const uint8_t* panels;
    int64_t rows;
    int64_t form;
};
constexpr int MAX_SEGMENTS = 4;

}  // namespace mill
