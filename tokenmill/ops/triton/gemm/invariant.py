"""Products in which a row's bits do not depend on how many rows there are, nor on which of them it is.

Every element of the result is one chain of matrix instructions over the inner dimension, 16 columns at a time (in
float32: one chain of multiply-adds), from its beginning to its end, in one program. Nothing of that chain depends on
the launch shape: a tile has more or fewer chains side by side, a longer step only issues more links of them at once.
So tiles may follow the number of rows, as speed wants. What must not change is the kind of instruction: a warpgroup
multiplies 64 rows of the left operand, so the left side of every tile is 64 or more, which for few rows is the weight.
There is no splitting of the inner dimension: it would have to be the same for a prompt of 8192 rows.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.launch import quick_launch

ALIGNMENT = 16  # bytes: of the rows of both operands, because they are copied by the tensor copy engine


@dataclass(frozen=True)
class Shape:
    """The tile of rows x columns, the step over the inner dimension, and how the hardware runs it."""

    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int
    rows_left: bool = False  # rows of x are the left operand (64 or more of them), not those of the weight
    programs: int = 1  # per multiprocessor
    group: int = 8  # tiles of rows that go through all weights together, for the sake of the cache


def choose_shape(rows: int, columns: int, inner: int, dtype: torch.dtype) -> Shape:
    """As measured on an H200 (scripts/gpu_invariant.py)."""
    if dtype == torch.float32:
        return Shape(32, 64, 32, 4, 3)
    if rows <= 16:
        if columns > 8192:
            return Shape(16, 128, 128, 4, 5)
        return Shape(16, 64, 256, 4, 4) if inner <= 4096 else Shape(16, 64, 128, 4, 8)
    if rows <= 32:
        return Shape(32, 64, 128, 4, 7)
    if rows <= 64:
        return Shape(64, 64, 128, 4, 6) if columns <= 8192 else Shape(64, 128, 64, 4, 4, programs=2)
    if rows <= 128:
        if columns <= 4096:  # more tiles, so that every multiprocessor has one
            return Shape(64, 64, 128, 4, 6)
        return Shape(128, 64, 128, 4, 4) if columns <= 8192 else Shape(128, 128, 64, 8, 6)
    if rows <= 512:
        if columns <= 4096:
            return Shape(128, 64, 128, 4, 4)
        return Shape(128, 128, 64, 8, 6) if columns <= 8192 else Shape(256, 128, 64, 8, 4)
    return Shape(128, 256, 64, 8, 3 if inner <= 4096 else 4, rows_left=True, group=16)


def invariant_gemm(
    x: torch.Tensor,  # [rows, inner]; bfloat16, float16 or float32
    weight: torch.Tensor,  # [columns, inner], the same dtype, contiguous
    bias: torch.Tensor | None = None,  # [columns]
    *,
    dtype: torch.dtype | None = None,  # of the result, by default x's
    shape: Shape | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [rows, columns]
    rows, inner = x.shape
    columns = weight.shape[0]
    x = _aligned(x)
    out = torch.empty(rows, columns, dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    shape = shape or choose_shape(rows, columns, inner, x.dtype)
    row_tiles, column_tiles = triton.cdiv(rows, shape.block_m), triton.cdiv(columns, shape.block_n)
    programs = min(row_tiles * column_tiles, shape.programs * multiprocessors(x.device))
    _gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [shape.block_m, shape.block_k]),
        TensorDescriptor.from_tensor(weight, [shape.block_n, shape.block_k]),
        bias, out, rows, columns, row_tiles, column_tiles, triton.cdiv(inner, shape.block_k),
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, ROWS_LEFT=shape.rows_left,
        GROUP=shape.group, num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    fits = x.stride(1) == 1 and x.stride(0) * x.itemsize % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


@quick_launch
@triton.jit(do_not_specialize=["rows", "row_tiles"])
def _gemm_kernel(
    x,  # descriptor of [rows, inner] in tiles of [BLOCK_M, BLOCK_K]; zeros outside
    weight,  # descriptor of [columns, inner] in tiles of [BLOCK_N, BLOCK_K]
    bias,  # [columns] or None
    out,  # [rows, columns]
    rows,
    columns,
    row_tiles,
    column_tiles,
    turns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
    GROUP: tl.constexpr,
):
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        # GROUP tiles of rows take turns before the next tile of weights.
        group = tile // (GROUP * column_tiles)
        size = tl.minimum(row_tiles - group * GROUP, GROUP)
        within = tile - group * GROUP * column_tiles
        first_row = (group * GROUP + within % size) * BLOCK_M
        first_column = within // size * BLOCK_N
        if ROWS_LEFT:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for turn in range(0, turns):
            value = x.load([first_row, turn * BLOCK_K])
            w = weight.load([first_column, turn * BLOCK_K])
            if ROWS_LEFT:
                acc = tl.dot(value, tl.trans(w), acc, input_precision="ieee")
            else:
                acc = tl.dot(w, tl.trans(value), acc, input_precision="ieee")
        column = first_column + tl.arange(0, BLOCK_N)
        row = first_row + tl.arange(0, BLOCK_M)
        result = acc if ROWS_LEFT else tl.trans(acc)
        if bias is not None:
            result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
