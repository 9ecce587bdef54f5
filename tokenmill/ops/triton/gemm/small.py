"""Products of a few rows with a large matrix: the weight is read once, at the speed of memory, in one launch.

One row is a sum per weight row on the ordinary cores (`_gemv_kernel`). More rows go through the tensor cores with the
weight as the left operand, so that few rows waste little (`_gemm_kernel`); where that gives too few programs, the
inner dimension is cut into parts, and whoever finishes an output tile last adds its parts up, always in the same order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import multiprocessors, room
from tokenmill.ops.triton.config import pipeline, power_of_two
from tokenmill.ops.triton.launch import ceil_div, prefetch_constants, quick_launch, start_next, wait_for_previous

# Where a plain product is faster here than in the matrix library, as measured on an H200 (scripts/gpu_gemm.py).
NARROW_COLUMNS, NARROW_INNER, NARROW_ROWS = 4096, 2048, 32  # few output columns, a long sum: the library splits badly
VOCABULARY_COLUMNS, VOCABULARY_ROWS = 100_000, (8, 64)
MOST_FASTEST_ROWS = max(NARROW_ROWS, *VOCABULARY_ROWS)
MAX_SPLITS = 8
MOST_ROWS_OF_A_TILE = 128
PREFETCHED_TURNS = tl.constexpr(4)
LEAST_TILE = 64  # output columns of the smallest tile: each has a split-K counter


@dataclass(frozen=True)
class GemvShape:
    """How one row is multiplied: weight rows per program and columns per turn of its loop."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class GemmShape:
    """How several rows are multiplied: the tile of the weight, the parts of the inner dimension, the pipeline."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


def counters_for(columns: int) -> int:
    """How many split-K counters a matrix with this many output columns may need."""
    return -(-columns // LEAST_TILE)


def small_gemm(
    x: torch.Tensor,  # [rows, inner]; bfloat16, float16, or with x_scale float8 or int8
    weight: torch.Tensor,  # [columns, inner]; x's dtype, or float8
    bias: torch.Tensor | None = None,  # [columns]
    *,
    scale: torch.Tensor | None = None,  # [columns] float32: what an eight-bit weight row is multiplied with
    x_scale: torch.Tensor | None = None,  # [rows] float32
    counters: torch.Tensor | None = None,  # [counters_for(columns)] int32 zeros, zero again afterwards; None: no parts
    dtype: torch.dtype | None = None,  # of the result, by default x's
    shape: GemvShape | GemmShape | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [rows, columns]
    rows, inner = x.shape
    columns = weight.shape[0]
    assert weight.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, columns, dtype=dtype or x.dtype, device=x.device)
    if shape is None:
        itemsizes = x.dtype.itemsize, weight.dtype.itemsize
        shape = choose_shape(rows, columns, inner, *itemsizes, x.device, may_split=counters is not None)
    if isinstance(shape, GemvShape):
        _gemv_kernel[(ceil_div(columns, shape.block_n),)](
            x, weight, bias, scale, x_scale, out, columns, inner,
            BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, EVEN_N=columns % shape.block_n == 0,
            EVEN_K=inner % shape.block_k == 0, num_warps=shape.num_warps,
        )  # fmt: skip
        return out
    block_m = _rows_of_a_tile(rows)
    row_tiles, tiles = ceil_div(rows, block_m), ceil_div(columns, shape.block_n)
    splits = shape.splits if row_tiles == 1 else 1  # more rows than a tile: there is enough to do
    partial = None
    if splits > 1:
        assert counters is not None and counters.numel() >= tiles
        sums = torch.int32 if x.dtype == torch.int8 else torch.float32
        partial = torch.empty(splits, tiles * shape.block_n * block_m, dtype=sums, device=x.device)
    turns = ceil_div(ceil_div(inner, shape.block_k), splits)
    _gemm_kernel[(row_tiles, tiles, splits)](
        x, weight, bias, scale, x_scale, out, partial, counters, rows, columns, inner, turns, x.stride(0),
        SPLITS=splits, BLOCK_M=block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        EVEN_K=inner % (shape.block_k * splits) == 0, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out


def fastest_rows(columns: int, inner: int) -> tuple[tuple[int, int], ...]:
    """Numbers of rows, first and last, of a plain product that should come here: one always, and several where the
    library wastes bandwidth.
    """
    if columns >= VOCABULARY_COLUMNS:
        return (1, 1), VOCABULARY_ROWS
    return ((1, NARROW_ROWS if columns <= NARROW_COLUMNS and inner >= NARROW_INNER else 1),)


@lru_cache(maxsize=1024)
def choose_shape(
    rows: int,
    columns: int,
    inner: int,
    x_itemsize: int,
    itemsize: int,  # of the weight
    device: torch.device,
    *,
    may_split: bool,
) -> GemvShape | GemmShape:
    if rows == 1:
        return _gemv_shape(columns, inner, itemsize)
    if x_itemsize == itemsize == 1 and inner >= 1024:
        shape = _fp8_shape(rows, columns, inner, may_split)
        column_bytes = shape.block_n + _rows_of_a_tile(rows)
        block_k, num_stages = pipeline(shape.num_stages, shape.block_k, column_bytes, room(device), device)
        return replace(shape, block_k=block_k, num_stages=num_stages)
    few = rows <= 32
    block_n, num_warps = (64, 4) if few else (128, 8)
    # A long pipeline; of narrow tiles two or three programs share a multiprocessor.
    column_bytes = block_n * itemsize + _rows_of_a_tile(rows) * x_itemsize
    most = 112 << 10 if few else 200 << 10
    block_k, num_stages = pipeline(6 if few else 4, min(128, max(32, power_of_two(inner))), column_bytes, most, device)
    splits = 1
    if may_split:
        # About two programs per multiprocessor, each with a loop long enough to pay for its start.
        wanted = 2 * multiprocessors(device) // ceil_div(columns, block_n)
        splits = max(1, min(wanted, inner // (3 * block_k), MAX_SPLITS))
    return GemmShape(block_n, block_k, 1 << (splits.bit_length() - 1), num_warps, num_stages)


def _gemv_shape(columns: int, inner: int, itemsize: int) -> GemvShape:
    """Every thread has 16-byte loads of several weight rows on their way; float8 wants fewer threads for that."""
    most = max(64, power_of_two(inner))
    if itemsize == 1:
        return GemvShape(4, min(512, most), 1) if columns > 4096 else GemvShape(4, min(1024, most), 2)
    if inner >= 8192:
        return GemvShape(1, 1024, 4)
    return GemvShape(4 if columns >= 4096 else 2, min(1024, most), 4)


def _fp8_shape(rows: int, columns: int, inner: int, may_split: bool) -> GemmShape:
    """Both sides float8: long tiles of the inner dimension, since a byte is all that an element takes."""
    splits = 2 if may_split and inner >= 8192 else 1
    if rows <= 64:
        if columns >= 16384 and rows > 32:
            return GemmShape(128, 128, 1, 8, 4)
        return GemmShape(64, 256, splits, 4, 5 if rows <= 32 else 4)
    if inner >= 8192:
        return GemmShape(128, 256, 4 if may_split else 1, 8, 3)
    return GemmShape(64, 128, 1, 4, 4)


def _rows_of_a_tile(rows: int) -> int:
    return min(MOST_ROWS_OF_A_TILE, max(16, power_of_two(rows)))


@quick_launch
@triton.jit
def _gemv_kernel(
    x,  # [1, inner]
    weight,  # [columns, inner]
    bias,  # [columns] or None
    scale,  # [columns] or None
    x_scale,  # [1] or None
    out,  # [1, columns]
    columns,
    inner,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = column if EVEN_N else tl.minimum(column, columns - 1)  # what lies outside is read again and not stored
    k = tl.arange(0, BLOCK_K)
    place = row.to(tl.int64)[:, None] * inner + k[None, :]
    # The weight is a constant: its first columns are on their way while the previous kernel still makes x.
    w = _weights(weight + place, k, inner, EVEN_K)
    if scale is not None:
        row_scale = tl.load(scale + row)
    if bias is not None:
        row_bias = tl.load(bias + row).to(tl.float32)
    wait_for_previous(PDL)
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    acc = w.to(SUM) * _inputs(x, k, inner, EVEN_K).to(SUM)[None, :]
    for start in range(BLOCK_K, inner, BLOCK_K):
        w = _weights(weight + place + start, start + k, inner, EVEN_K)
        acc += w.to(SUM) * _inputs(x, start + k, inner, EVEN_K).to(SUM)[None, :]
    total = tl.sum(acc, 1).to(tl.float32)
    if scale is not None:
        total *= row_scale
    if x_scale is not None:
        total *= tl.load(x_scale)
    if bias is not None:
        total += row_bias
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _weights(pointers, k, inner, EVEN_K: tl.constexpr):  # [BLOCK_N, BLOCK_K]
    if EVEN_K:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k < inner)[None, :], other=0.0)


@triton.jit
def _inputs(x, k, inner, EVEN_K: tl.constexpr):  # [BLOCK_K]
    if EVEN_K:
        return tl.load(x + k)
    return tl.load(x + k, mask=k < inner, other=0.0)


@quick_launch
@triton.jit(do_not_specialize=["rows", "turns"])
def _gemm_kernel(
    x,  # [rows, inner]
    weight,  # [columns, inner]
    bias,  # [columns] or None
    scale,  # [columns] or None
    x_scale,  # [rows] or None
    out,  # [rows, columns]
    partial,  # [SPLITS, tiles, BLOCK_N, BLOCK_M] float32 (int32 of int8) or None
    counters,  # [tiles] int32 or None
    rows,
    columns,
    inner,
    turns,
    stride_x,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = split * turns * BLOCK_K
    k = begin + tl.arange(0, BLOCK_K)
    # What lies outside is read again from the last row and not stored.
    weight += tl.minimum(column, columns - 1).to(tl.int64)[:, None] * inner
    weights = weight + k[None, :]
    # The loop's own loads cannot begin before x is there, so the weights of its first turns are sent for here.
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of a line of the cache
    lines = begin + tl.arange(0, PREFETCHED_TURNS * BLOCK_K // LINE) * LINE
    prefetch_constants(weight + tl.minimum(lines, inner - 1)[None, :], PDL)
    wait_for_previous(PDL)
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * stride_x + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32)
    for turn in range(0, turns):
        if EVEN_K:
            w = tl.load(weights)
            value = tl.load(inputs)
        else:
            inside = k < inner - turn * BLOCK_K
            w = tl.load(weights, mask=inside[None, :], other=0.0)
            value = tl.load(inputs, mask=inside[:, None], other=0.0)
        acc = tl.dot(_as_input(w, value.dtype), value, acc, input_precision="ieee", out_dtype=acc.dtype)
        weights += BLOCK_K
        inputs += BLOCK_K

    finish_tile(acc, bias, scale, x_scale, out, row, column, rows, columns, partial, counters, tile, split, SPLITS)


@triton.jit
def _as_input(w, dtype: tl.constexpr):
    """A float8 weight in the dtype of the input. All steps are exact; the way round through float32 takes
    instructions of four times the rate of the direct one from float16 to bfloat16.
    """
    if w.dtype != dtype:
        w = w.to(tl.float16)
        if dtype != tl.float16:
            w = w.to(tl.float32).to(dtype)
    return w


@triton.jit
def finish_tile(
    acc, bias, scale, x_scale, out, row, column, rows, columns, partial, counters, tile, split, SPLITS: tl.constexpr
):
    """Store a tile [columns, rows], which may be one of several parts of a sum: who ends last adds them up."""
    if SPLITS > 1:
        HEIGHT: tl.constexpr = acc.shape[0]
        WIDTH: tl.constexpr = acc.shape[1]
        cell = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        mine = partial + tile.to(tl.int64) * (HEIGHT * WIDTH) + cell
        part = tl.num_programs(1).to(tl.int64) * (HEIGHT * WIDTH)
        tl.store(mine + split * part, acc, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counters + tile, 0)  # ready for the next launch
            acc = tl.load(mine, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                acc += tl.load(mine + other * part, cache_modifier=".cg")
            _scale_and_store(acc, bias, scale, x_scale, out, row, column, rows, columns)
    else:
        _scale_and_store(acc, bias, scale, x_scale, out, row, column, rows, columns)


@triton.jit
def _scale_and_store(acc, bias, scale, x_scale, out, row, column, rows, columns):
    acc = acc.to(tl.float32)
    if scale is not None:
        acc *= tl.load(scale + column, mask=column < columns, other=0.0)[:, None]
    if x_scale is not None:
        acc *= tl.load(x_scale + row, mask=row < rows, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * columns + column[:, None]
    inside = (row < rows)[None, :] & (column < columns)[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
