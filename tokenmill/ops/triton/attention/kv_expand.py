"""Codes become numbers, some at once: a few instructions for all bytes of a pair of words."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.instructions import for_target

INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
INT4 = tl.constexpr(3)
_PTX = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter knows no instructions


@triton.jit
def expand(words, kind, FORM: tl.constexpr):
    """Byte i of every word, as a number."""
    if _PTX and kind == tl.float16:
        if FORM == INT8:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, low, high, all;
                xor.b32 a, $4, 0x80808080;
                xor.b32 b, $5, 0x80808080;
                prmt.b32 low, a, b, 0x5140;
                prmt.b32 high, a, b, 0x7362;
                mov.b32 all, 0x64646464;  // 1024 + byte, in float16
                prmt.b32 $0, low, all, 0x4140;
                prmt.b32 $1, low, all, 0x4342;
                prmt.b32 $2, high, all, 0x4140;
                prmt.b32 $3, high, all, 0x4342;
                mov.b32 all, 0x64806480;
                sub.f16x2 $0, $0, all;
                sub.f16x2 $1, $1, all;
                sub.f16x2 $2, $2, all;
                sub.f16x2 $3, $3, all;
                }""",
                "=r,=r,=r,=r,r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 low, high;
                .reg .b16 a, b, c, d;
                prmt.b32 low, $4, $5, 0x5140;
                prmt.b32 high, $4, $5, 0x7362;
                mov.b32 {a, b}, low;
                mov.b32 {c, d}, high;
                cvt.rn.f16x2.e4m3x2 $0, a;
                cvt.rn.f16x2.e4m3x2 $1, b;
                cvt.rn.f16x2.e4m3x2 $2, c;
                cvt.rn.f16x2.e4m3x2 $3, d;
                }""",
                "=r,=r,=r,=r,r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        out = ()
        for i in tl.static_range(4):
            byte = (words >> (8 * i)).to(tl.int8)
            out += ((byte if FORM == INT8 else byte.to(tl.float8e4nv, bitcast=True)).to(kind),)
        return out


@triton.jit
def expand_halves(twins, low_scale, low_least, high_scale, high_least, kind):
    """The lower halves of bytes and the upper ones, as numbers with their scales and minima."""
    if _PTX and kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            for_target("""{
            .reg .b32 low, high, all;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 all, 0x43434343;
            prmt.b32 $0, low, all, 0x4140;  // 0x4300 + code is 128 + code in bfloat16
            prmt.b32 $1, low, all, 0x4342;
            prmt.b32 $2, high, all, 0x4140;
            prmt.b32 $3, high, all, 0x4342;
            mov.b32 all, 0x43004300;
            sub.bf16x2 $0, $0, all;
            sub.bf16x2 $1, $1, all;
            sub.bf16x2 $2, $2, all;
            sub.bf16x2 $3, $3, all;
            fma.rn.bf16x2 $0, $0, $5, $7;
            fma.rn.bf16x2 $1, $1, $6, $8;
            fma.rn.bf16x2 $2, $2, $9, $11;
            fma.rn.bf16x2 $3, $3, $10, $12;
            }"""),
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [twins, low_scale, low_least, high_scale, high_least],
            (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (twins & 15).to(tl.float32) * low_scale.to(tl.float32) + low_least.to(tl.float32)
        high = (twins >> 4).to(tl.float32) * high_scale.to(tl.float32) + high_least.to(tl.float32)
        return low.to(kind), high.to(kind)


@triton.jit
def expand_neighbours(words):
    """Words of four fp8 codes as four matrices of float16: bytes 0 and 1 of a word with an even number and the next
    word are two neighbours in the first, bytes 2 and 3 of the former in the second, and of the latter in the others.

    Only where a thread holds words two by two along a key, as the left operand of a product has them.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b, c, d;
            mov.b32 {a, b}, $4;
            mov.b32 {c, d}, $5;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            cvt.rn.f16x2.e4m3x2 $2, c;
            cvt.rn.f16x2.e4m3x2 $3, d;
            }""",
            "=r,=r,=r,=r,r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
        out = ()
        for i in tl.static_range(4):
            word = even if i < 2 else odd
            out += (tl.interleave(_byte(word, i % 2 * 2, FP8), _byte(word, i % 2 * 2 + 1, FP8)),)
        return out


@triton.jit
def _byte(words, NUMBER: tl.constexpr, FORM: tl.constexpr):
    byte = (words >> (8 * NUMBER)).to(tl.int8)
    return (byte.to(tl.float8e4nv, bitcast=True) if FORM == FP8 else byte).to(tl.float16)


@triton.jit
def expand_pairs(pairs, FORM: tl.constexpr):
    """The lower byte of every number of sixteen bits and the upper one, in float16."""
    if _PTX and FORM == INT8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, all;
            xor.b32 a, $2, 0x80808080;
            mov.b32 all, 0x64646464;  // 1024 + byte, in float16
            prmt.b32 $0, a, all, 0x4240;
            prmt.b32 $1, a, all, 0x4341;
            mov.b32 all, 0x64806480;
            sub.f16x2 $0, $0, all;
            sub.f16x2 $1, $1, all;
            }""",
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            .reg .b16 a, b;
            prmt.b32 both, $2, $2, 0x3120;
            mov.b32 {a, b}, both;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return _byte(pairs, 0, FORM), _byte(pairs, 1, FORM)


@triton.jit
def split_halves(twins):
    """The lower halves of bytes and the upper ones, as bytes."""
    if _PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 high;
            shr.u32 high, $2, 4;
            and.b32 $0, $2, 0x0F0F0F0F;
            and.b32 $1, high, 0x0F0F0F0F;
            }""",
            "=&r,=&r,r", [twins], (tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return twins & 15, (twins >> 4) & 15


@triton.jit
def expand_pairs_of_halves(pairs, low_scale, low_least, high_scale, high_least, kind):
    """The four codes in every number of sixteen bits, from the lowest to the highest, with their scales and minima."""
    if _PTX and kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            for_target("""{
            .reg .b32 b, c, d, all;
            shr.u32 b, $4, 4;
            shr.u32 c, $4, 8;
            shr.u32 d, $4, 12;
            mov.b32 all, 0x43004300;
            lop3.b32 $0, $4, 0x000F000F, all, 0xEA;  // 0x4300 + code is 128 + code in bfloat16
            lop3.b32 $1, b, 0x000F000F, all, 0xEA;
            lop3.b32 $2, c, 0x000F000F, all, 0xEA;
            lop3.b32 $3, d, 0x000F000F, all, 0xEA;
            sub.bf16x2 $0, $0, all;
            sub.bf16x2 $1, $1, all;
            sub.bf16x2 $2, $2, all;
            sub.bf16x2 $3, $3, all;
            fma.rn.bf16x2 $0, $0, $5, $6;
            fma.rn.bf16x2 $1, $1, $7, $8;
            fma.rn.bf16x2 $2, $2, $5, $6;
            fma.rn.bf16x2 $3, $3, $7, $8;
            }"""),
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [pairs, low_scale, low_least, high_scale, high_least],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        out = ()
        for i in tl.static_range(4):
            scale = low_scale if i % 2 == 0 else high_scale
            least = low_least if i % 2 == 0 else high_least
            code = ((pairs >> (4 * i)) & 15).to(tl.float32)
            out += ((code * scale.to(tl.float32) + least.to(tl.float32)).to(kind),)
        return out


@triton.jit
def log2(x):
    """Of normal numbers, as all scales are."""
    if _PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def inverse(x):
    """Of normal numbers."""
    if _PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def split_words(words):
    """The lower halves of words and the upper ones, as the bfloat16 that they are."""
    if _PTX:
        return tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, $3, 0x5410;
            prmt.b32 $1, $2, $3, 0x7632;
            """,
            "=&r,=&r,r,r", [words], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
