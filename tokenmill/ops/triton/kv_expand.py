"""Codes become numbers, some at once: a few instructions for all bytes of a pair of words."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


@triton.jit
def expand(words, kind, FORM: tl.constexpr, PTX: tl.constexpr):
    """Byte i of every word, as a number."""
    if PTX and kind == tl.float16:
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
def expand_halves(twins, low_scale, low_least, high_scale, high_least, kind, PTX: tl.constexpr):
    """The lower halves of bytes and the upper ones, as numbers with their scales and minima."""
    if PTX and kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
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
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [twins, low_scale, low_least, high_scale, high_least],
            (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (twins & 15).to(tl.float32) * low_scale.to(tl.float32) + low_least.to(tl.float32)
        high = (twins >> 4).to(tl.float32) * high_scale.to(tl.float32) + high_least.to(tl.float32)
        return low.to(kind), high.to(kind)
