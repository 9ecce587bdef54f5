"""How small codes become floats in registers: 4-bit and 8-bit integers and float8, several to a 16-bit word.

A word holds the codes of PARTS columns that lie RUN columns apart. So the words of a tile become PARTS tiles of
consecutive columns, and two neighbouring words, which share a register, become two neighbouring 16-bit floats of each
part: nothing has to move between lanes, and every instruction works on two weights.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

# lop3.b32's tables
_AND_OR, _AND_XOR = "0xEA", "0x6A"  # (a & b) | c, (a & b) ^ c


@dataclass(frozen=True)
class Codes:
    """A matrix [columns, inner] as the kernels read it."""

    words: torch.Tensor  # [columns, inner / parts] int16
    scale: torch.Tensor  # [columns, groups] float32
    zeros: torch.Tensor | None  # [columns, groups] int8; only with int4
    kind: str  # "int4", "int8" or "fp8"
    run: int  # consecutive columns at one position of the words

    @property
    def parts(self) -> int:
        """Codes in a word."""
        return parts_of(self.kind)

    @property
    def inner(self) -> int:
        return self.words.shape[1] * self.parts

    @property
    def group(self) -> int:
        """Columns that share a scale; 0: all of a row."""
        groups = self.scale.shape[1]
        return 0 if groups == 1 else self.inner // groups


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
UPPER_BITS = tl.constexpr(f"lop3.b32 $0, $1, 0x000F0000, 0x43000000, {_AND_OR};")
LOWER_BITS = tl.constexpr(f"lop3.b32 $0, $1, 0x0000F000, 0x45000000, {_AND_OR};")


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
def wide_pair(words, j: tl.constexpr, KIND: tl.constexpr):
    """Part j of pairs of 16-bit words (uint32): both codes as float32, plus `pair_offset(j, KIND)`.

    Codes of four bits are taken from two places only, where they are mantissa bits of 128 or of 2048: three rotations
    or shifts serve all eight, and what is too much is subtracted from the sum.
    """
    if KIND == "int4":
        turned = (words >> 16) | (words << 16)
        if j == 0:
            low, high = turned, words
        elif j == 3:
            low, high = words, turned
        else:
            low, high = words << 8, words >> 8
        low, high = _plus_power(low, j % 2 == 0), _plus_power(high, j % 2 == 0)
    elif KIND == "int8":
        low = (((words >> (8 * j)) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 128
        high = (((words >> (8 * j + 16)) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
    else:
        # Sign, exponent and mantissa in their places, times 2^120: what lies between the biases of the exponents.
        if j == 0:
            low = ((words << 24) & 0x80000000) | ((words << 20) & 0x07F00000)
            high = ((words << 8) & 0x80000000) | ((words << 4) & 0x07F00000)
        else:
            low = ((words << 16) & 0x80000000) | ((words << 12) & 0x07F00000)
            high = (words & 0x80000000) | ((words >> 4) & 0x07F00000)
        low = low.to(tl.float32, bitcast=True) * 1.329227995784916e36
        high = high.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return low, high


@triton.jit
def _plus_power(words, UPPER: tl.constexpr):
    """128 + bits 16 to 19, or 2048 + bits 12 to 15, in float32."""
    if COMPILED:  # one instruction, of which the compiler would make two
        return tl.inline_asm_elementwise(
            UPPER_BITS if UPPER else LOWER_BITS, "=r,r", [words], dtype=tl.float32, is_pure=True, pack=1
        )
    bits = (words & 0xF0000) | 0x43000000 if UPPER else (words & 0xF000) | 0x45000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pair_offset(j: tl.constexpr, KIND: tl.constexpr):
    if KIND != "int4":
        return 0.0
    return 136.0 if j % 2 == 0 else 2056.0


@triton.jit
def of_group(values, block, j: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr):
    """What the group of part j has in these blocks of PARTS * RUN columns, in float32; values: its row's pointers."""
    if GROUP == 0:
        found = tl.load(values)
    else:
        found = tl.load(values + (block * PARTS + j) // (GROUP // RUN))
    return found.to(tl.float32)


@triton.jit
def of_groups(values, block, PARTS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr):
    """What the groups of all parts have, as a tuple of PARTS."""
    a, b = of_group(values, block, 0, PARTS, RUN, GROUP), of_group(values, block, 1, PARTS, RUN, GROUP)
    if PARTS == 2:
        return a, b
    else:  # or the compiler would follow both ways
        c, d = of_group(values, block, 2, PARTS, RUN, GROUP), of_group(values, block, 3, PARTS, RUN, GROUP)
        return a, b, c, d
