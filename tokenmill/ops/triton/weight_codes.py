"""How small codes are stored for the tensor cores, and how they become floats in registers.

A 16-bit word holds the codes of PARTS columns that lie 16 columns apart: four of 4 bits (columns c, c + 16, c + 32,
c + 48 from the lowest bits to the highest) or two of 8. The words of 16 rows and 16 * PARTS columns are a tile, and
are stored in the order in which the lanes of a warp hold the left operand of an `mma` instruction: a lane's eight words
lie side by side. So a tile is one load of 16 bytes per lane, two neighbouring words share a register and become two
neighbouring 16-bit floats of each part, every instruction works on two weights, and nothing moves between lanes.

    word of row (band, high, g), word column (k_high, t, k_low):   words[band, tile, g, t, k_high, high, k_low]
    scale or zero of that row:                                     scale[band, group, g, high]

with a row as band * 16 + high * 8 + g and a word column as k_high * 8 + t * 2 + k_low; lanes are numbered g * 4 + t.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

TILE = 16  # rows of a tile, and words of each of them

# lop3.b32's tables
_AND_OR, _AND_XOR = "0xEA", "0x6A"  # (a & b) | c, (a & b) ^ c


@dataclass(frozen=True)
class Codes:
    """A matrix [columns, inner] as the kernels read it."""

    words: torch.Tensor  # [columns / 16, tiles, 256] int16
    scale: torch.Tensor  # [columns / 16, groups, 16] float32
    zeros: torch.Tensor | None  # [columns / 16, groups, 16] int8; only with int4
    kind: str  # "int4", "int8" or "fp8"

    @property
    def parts(self) -> int:
        """Codes in a word."""
        return parts_of(self.kind)

    @property
    def columns(self) -> int:
        return self.words.shape[0] * TILE

    @property
    def inner(self) -> int:
        return self.words.shape[1] * TILE * self.parts

    @property
    def group(self) -> int:
        """Columns that share a scale; 0: all of a row."""
        groups = self.scale.shape[1]
        return 0 if groups == 1 else self.inner // groups

    @property
    def step(self) -> int:
        """Tiles that are multiplied at once: as many as share their scales, unless a tile has several itself."""
        tiles, width = self.words.shape[1], TILE * self.parts
        most = min(self.group or 4 * width, 4 * width)
        return next(size for size in (4, 2, 1) if tiles % size == 0 and size * width <= max(most, width))


def parts_of(kind: str) -> int:
    return 4 if kind == "int4" else 2


def _text(parts: int, lines: list[str]) -> str:
    outputs = "\n".join(lines)
    return f"{{\n.reg .b32 a, b, c, q;\nmov.b32 q, ${parts};\n{outputs}\n}}"


def _int4(kind: str, exponent: str, offset: str) -> str:
    """A code in the lowest bits of the mantissa of a power of two, which is then subtracted with the codes' own 8."""
    lines = [f"mov.b32 b, {offset};"]
    for j in range(4):
        lines.append(f"shr.b32 a, q, {4 * j};" if j else "mov.b32 a, q;")
        lines.append(f"lop3.b32 a, a, 0x000F000F, {exponent}, {_AND_OR};")
        lines.append(f"sub.{kind} ${j}, a, b;")
    return _text(4, lines)


def _int8_bf16() -> str:
    """Seven bits fill the mantissa of 128; the sign bit is the last of the exponent: 128, or 256 to subtract."""
    lines = []
    for j in range(2):
        lines.append(f"shr.b32 c, q, {8 * j};" if j else "mov.b32 c, q;")
        lines.append(f"lop3.b32 a, c, 0x007F007F, 0x43004300, {_AND_OR};")
        lines.append(f"lop3.b32 b, c, 0x00800080, 0x43004300, {_AND_OR};")
        lines.append(f"sub.bf16x2 ${j}, a, b;")
    return _text(2, lines)


def _int8_fp16() -> str:
    """Eight bits, the sign turned around, in the mantissa of 1024: 1152 too much."""
    lines = ["mov.b32 b, 0x64806480;"]
    for j in range(2):
        lines.append(f"shr.b32 a, q, {8 * j};" if j else "mov.b32 a, q;")
        lines.append(f"lop3.b32 a, a, 0x00FF00FF, 0x64806480, {_AND_XOR};")
        lines.append(f"sub.f16x2 ${j}, a, b;")
    return _text(2, lines)


def _fp8(kind: str, up: int, mask: str, factor: str) -> str:
    """Exponent and mantissa moved in place, the sign on top; the factor makes up for the other bias of exponents."""
    down = 8 - up
    return _text(
        2,
        [
            f"mov.b32 c, {factor};",
            f"shl.b32 a, q, {up};",
            f"and.b32 a, a, {mask};",
            "shl.b32 b, q, 8;",
            f"lop3.b32 a, b, 0x80008000, a, {_AND_OR};",
            f"mul.{kind} $0, a, c;",
            f"shr.b32 a, q, {down};",
            f"and.b32 a, a, {mask};",
            f"lop3.b32 a, q, 0x80008000, a, {_AND_OR};",
            f"mul.{kind} $1, a, c;",
        ],
    )


INT4_BF16 = tl.constexpr(_int4("bf16x2", "0x43004300", "0x43084308"))
INT4_FP16 = tl.constexpr(_int4("f16x2", "0x64006400", "0x64086408"))
INT8_BF16 = tl.constexpr(_int8_bf16())
INT8_FP16 = tl.constexpr(_int8_fp16())
FP8_BF16 = tl.constexpr(_fp8("bf16x2", 4, "0x07F007F0", "0x7B807B80"))
FP8_FP16 = tl.constexpr(_fp8("f16x2", 7, "0x3F803F80", "0x5C005C00"))


@triton.jit
def code_values(words, j: tl.constexpr, KIND: tl.constexpr):
    """Part j of the words as float32, zeros not subtracted: in plain operations, for where memory is the limit."""
    if KIND == "int4":
        value = ((words >> (4 * j)) & 15).to(tl.float32) - 8.0
    elif KIND == "int8":
        value = ((words >> (8 * j)) & 255).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        value = ((words >> (8 * j)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return value


COMPILED = tl.constexpr(isinstance(code_values, JITFunction))  # else the interpreter runs, which knows no instructions


@triton.jit
def unpack_int4(words, DTYPE: tl.constexpr):
    """The four parts of the words."""
    if COMPILED:
        if tl.bfloat16 == DTYPE:
            a, b, c, d = tl.inline_asm_elementwise(
                INT4_BF16, "=r,=r,=r,=r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                INT4_FP16, "=r,=r,=r,=r,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        a, b = code_values(words, 0, "int4").to(DTYPE), code_values(words, 1, "int4").to(DTYPE)
        c, d = code_values(words, 2, "int4").to(DTYPE), code_values(words, 3, "int4").to(DTYPE)
    return a, b, c, d


@triton.jit
def unpack_bytes(words, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The two parts of the words."""
    if COMPILED:
        if tl.bfloat16 == DTYPE:
            a, b = tl.inline_asm_elementwise(
                INT8_BF16 if KIND == "int8" else FP8_BF16, "=r,=r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            a, b = tl.inline_asm_elementwise(
                INT8_FP16 if KIND == "int8" else FP8_FP16, "=r,=r,r", [words],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        a, b = code_values(words, 0, KIND).to(DTYPE), code_values(words, 1, KIND).to(DTYPE)
    return a, b


@triton.jit
def axis(size: tl.constexpr, at: tl.constexpr, rank: tl.constexpr):
    """0, 1, ... along dimension `at` of a tensor of this rank, which is 1 in all others."""
    found = tl.arange(0, size)
    for i in tl.static_range(rank):
        if i != at:
            found = tl.expand_dims(found, i)
    return found
