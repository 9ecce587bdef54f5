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

from tokenmill.ops.device_facts import release
from tokenmill.ops.triton.instructions import for_target

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


def int4_lines(bf16: bool, j: int) -> list[str]:
    """A code in the lowest bits of the mantissa of a power of two, which is then subtracted with the codes' own 8."""
    kind, power, too_much = ("bf16x2", "0x43004300", "0x43084308") if bf16 else ("f16x2", "0x64006400", "0x64086408")
    return [
        f"shr.b32 a, q, {4 * j};",
        f"lop3.b32 a, a, 0x000F000F, {power}, {_AND_OR};",
        f"mov.b32 b, {too_much};",
        f"sub.{kind} a, a, b;",
    ]


def _int8(bf16: bool, j: int) -> list[str]:
    """Of bfloat16, seven bits fill the mantissa of 128, and the sign bit is the last of the exponent: it makes the 128
    to subtract 256. Of float16, eight bits, the sign turned around, are in the mantissa of 1024: 1152 too much.
    """
    if bf16:
        return [
            f"shr.b32 q, q, {8 * j};",
            f"lop3.b32 a, q, 0x007F007F, 0x43004300, {_AND_OR};",
            f"lop3.b32 b, q, 0x00800080, 0x43004300, {_AND_OR};",
            "sub.bf16x2 a, a, b;",
        ]
    return [
        f"shr.b32 a, q, {8 * j};",
        f"lop3.b32 a, a, 0x00FF00FF, 0x64806480, {_AND_XOR};",
        "mov.b32 b, 0x64806480;",
        "sub.f16x2 a, a, b;",
    ]


def _fp8(bf16: bool, j: int) -> list[str]:
    """Exponent and mantissa moved in place, the sign on top; the factor makes up for the other bias of exponents."""
    kind, up, mask = ("bf16x2", 4, "0x07F007F0") if bf16 else ("f16x2", 7, "0x3F803F80")
    factor = "0x7B807B80" if bf16 else "0x5C005C00"
    return [
        f"shl.b32 a, q, {up};" if j == 0 else f"shr.b32 a, q, {8 - up};",
        f"and.b32 a, a, {mask};",
        f"shl.b32 b, q, {8 - 8 * j};",
        f"lop3.b32 a, b, 0x80008000, a, {_AND_OR};",
        f"mov.b32 b, {factor};",
        f"mul.{kind} a, a, b;",
    ]


def instructions(kind: str, bf16: bool, j: int) -> str:
    """Part j of a pair of words ($2) as two 16-bit floats ($0 and $1)."""
    lines = {"int4": int4_lines, "int8": _int8, "fp8": _fp8}[kind](bf16, j)
    return "{\n.reg .b32 a, b, q;\nmov.b32 q, $2;\n" + "\n".join(lines) + "\nmov.b32 {$0, $1}, a;\n}"


# By kind, then for bfloat16 or float16, then by part.
TEXTS = tl.constexpr(
    {
        kind: {bf16: [instructions(kind, bf16, j) for j in range(parts_of(kind))] for bf16 in (True, False)}
        for kind in ("int4", "int8", "fp8")
    }
)


@triton.constexpr_function
def _text(kind, bf16, j):
    return for_target(TEXTS.value[kind][bf16][j])


@triton.jit
def _plain(words, j: tl.constexpr, KIND: tl.constexpr):
    """Part j of single words, in operations that the interpreter knows."""
    if KIND == "int4":
        return ((words >> (4 * j)) & 15).to(tl.float32) - 8.0
    byte = ((words >> (8 * j)) & 255).to(tl.uint8)
    return byte.to(tl.int8 if KIND == "int8" else tl.float8e4nv, bitcast=True).to(tl.float32)


COMPILED = tl.constexpr(isinstance(_plain, JITFunction))  # else the interpreter runs, which knows no instructions
TWO_BF16 = tl.constexpr((tl.bfloat16, tl.bfloat16))
TWO_FP16 = tl.constexpr((tl.float16, tl.float16))


@triton.jit
def unpack(pairs, j: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Part j of pairs of words (uint32), with one more dimension: the two words. Zeros are not subtracted."""
    if COMPILED:
        BF16: tl.constexpr = tl.bfloat16 == DTYPE
        text: tl.constexpr = _text(KIND, BF16, j)
        low, high = tl.inline_asm_elementwise(
            text, "=h,=h,r", [pairs], dtype=TWO_BF16 if BF16 else TWO_FP16, is_pure=True, pack=1
        )
    else:
        low, high = _plain(pairs & 0xFFFF, j, KIND).to(DTYPE), _plain(pairs >> 16, j, KIND).to(DTYPE)
    return tl.join(low, high)


@triton.jit
def axis(size: tl.constexpr, at: tl.constexpr, rank: tl.constexpr):
    """0, 1, ... along dimension `at` of a tensor of this rank, which is 1 in all others."""
    found = tl.arange(0, size)
    for i in tl.static_range(rank):
        if i != at:
            found = tl.expand_dims(found, i)
    return found


# A load whose pointers follow one another along the last dimension only: over which others do lanes and warps go on?
# Up to Triton 3.6 over the first ones, from 3.7 on over the last ones. What kernels say is the older order: a load is
# written with `lane_axis`, and `in_order` turns around what was loaded. A lane keeps its numbers, so it costs nothing.
LAST_FIRST = tl.constexpr(release() >= (3, 7))


@triton.constexpr_function
def _reversed(at, rank):
    return rank - 2 - at if LAST_FIRST and at < rank - 1 else at


@triton.jit
def lane_axis(size: tl.constexpr, at: tl.constexpr, rank: tl.constexpr):
    """As `axis`, for pointers and masks of a load; lanes and warps go over the first dimensions first."""
    return axis(size, _reversed(at, rank), rank)


@triton.jit
def in_order(loaded, RANK: tl.constexpr):
    """What was loaded with `lane_axis`, with its dimensions as they are numbered there."""
    if not LAST_FIRST:
        return loaded
    elif RANK == 4:
        return loaded.permute(2, 1, 0, 3)
    elif RANK == 5:
        return loaded.permute(3, 2, 1, 0, 4)
    elif RANK == 6:
        return loaded.permute(4, 3, 2, 1, 0, 5)
    else:
        tl.static_assert(RANK == 9)
        return loaded.permute(7, 6, 5, 4, 3, 2, 1, 0, 8)
