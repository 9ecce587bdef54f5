"""Products with weights of four or eight bits: the codes are read once and become floats in registers.

One row has a kernel of its own (gemv_weight_only.py). A few rows go through the tensor cores with the weight as the
left operand (`_gemm_kernel`), split over the inner dimension where there are too few tiles. Codes are multiplied as
exact small numbers, and each group's sum is scaled in float32. For many rows a weight is worth widening: `widened`
writes it out as 16-bit floats for the matrix library.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import multiprocessors, power_of_two
from tokenmill.ops.triton.gemm_small import MAX_SPLITS, GemmShape, GemvShape
from tokenmill.ops.triton.gemv_weight_only import launch_gemv
from tokenmill.ops.triton.launch import ceil_div, prefetch_constants, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.weight_codes import (
    Codes,
    code_values,
    of_group,
    of_groups,
    parts_of,
    unpack_bytes,
    unpack_int4,
)

MOST_ROWS = 128  # of a product here; with more, the widened weight is faster
LEAST_RUN = 16  # columns: what the tensor cores take at once
MOST_ROWS_OF_A_TILE = 64
PREFETCHED_WORDS = tl.constexpr(512)  # of each row, while the previous kernel still runs
LINE = tl.constexpr(64)  # words of a line of the cache


def takes(x: torch.Tensor, codes: Codes) -> bool:
    """Whether `weight_only_gemm` can multiply these rows; how many are worth it is another question."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.shape[0] > 0 and codes.run >= LEAST_RUN


def weight_only_gemm(
    x: torch.Tensor,  # [rows, inner]; bfloat16 or float16
    codes: Codes,
    bias: torch.Tensor | None = None,  # [columns]
    *,
    arrivals: torch.Tensor | None = None,  # [counters_for(columns)] int32 zeros, zero again afterwards; None: no parts
    shape: GemvShape | GemmShape | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [rows, columns]
    rows = x.shape[0]
    columns, width = codes.words.shape
    x = x if x.stride(1) == 1 and x.storage_offset() % 2 == 0 else x.clone(memory_format=torch.contiguous_format)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if shape is None:
        shape = choose_shape(rows, columns, width, codes.run, codes.kind, x.device, may_split=arrivals is not None)
    if isinstance(shape, GemvShape):
        launch_gemv(x, codes, bias, out, shape)
    else:
        _launch_gemm(x, codes, bias, out, arrivals, shape)
    return out


def widened(codes: Codes, dtype: torch.dtype) -> torch.Tensor:  # [columns, inner]
    """The matrix as floats, at the speed of memory."""
    columns, width = codes.words.shape
    out = torch.empty(columns, codes.inner, dtype=dtype, device=codes.words.device)
    block_n = max(1, 4096 // codes.run)
    _widen_kernel[(width // codes.run, ceil_div(columns, block_n))](
        codes.words, codes.scale, codes.zeros, out, columns, width, codes.scale.shape[1],
        KIND=codes.kind, PARTS=codes.parts, RUN=codes.run, GROUP=codes.group, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out


@lru_cache(maxsize=1024)
def choose_shape(
    rows: int,
    columns: int,
    width: int,  # words of a row
    run: int,
    kind: str,
    device: torch.device,
    *,
    may_split: bool,
) -> GemvShape | GemmShape:
    """block_k counts words: of a pair each for one row, single ones for several."""
    if rows == 1:
        return GemvShape(4, min(512, max(64, power_of_two(width // 2))), 4)
    few = rows <= 16
    block_n, num_warps = (64, 4) if few else (128, 8)
    block_k = min(run, 128 if few else 64)
    splits = 1
    if may_split:
        # About three programs per multiprocessor, each with a few turns at least.
        wanted = 3 * multiprocessors(device) // ceil_div(columns, block_n)
        splits = max(1, min(wanted, width // (2 * block_k), MAX_SPLITS))
    stage_bytes = 2 * block_k * (block_n + parts_of(kind) * _rows_of_a_tile(rows))
    num_stages = max(2, min(5, (72 << 10) // stage_bytes if few else (200 << 10) // stage_bytes))
    return GemmShape(block_n, block_k, 1 << (splits.bit_length() - 1), num_warps, num_stages)


def _rows_of_a_tile(rows: int) -> int:
    return min(MOST_ROWS_OF_A_TILE, max(8, power_of_two(rows)))


def _launch_gemm(
    x: torch.Tensor,
    codes: Codes,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    arrivals: torch.Tensor | None,
    shape: GemmShape,
) -> None:
    rows = x.shape[0]
    columns, width = codes.words.shape
    block_m = _rows_of_a_tile(rows)
    row_tiles, tiles = ceil_div(rows, block_m), ceil_div(columns, shape.block_n)
    all_turns = width // shape.block_k
    assert shape.block_k <= codes.run and width % shape.block_k == 0
    turns = ceil_div(all_turns, shape.splits if row_tiles == 1 else 1)  # more rows than a tile: there is enough to do
    splits = ceil_div(all_turns, turns)  # none of them without a turn
    partial = None
    if splits > 1:
        assert arrivals is not None and arrivals.numel() >= tiles
        partial = torch.empty(splits, tiles * shape.block_n * block_m, dtype=torch.float32, device=x.device)
    _gemm_kernel[(row_tiles, tiles, splits)](
        x, codes.words, codes.scale, codes.zeros, bias, out, partial, arrivals,
        rows, columns, width, codes.scale.shape[1], all_turns, turns, x.stride(0),
        KIND=codes.kind, PARTS=codes.parts, RUN=codes.run, GROUP=codes.group, SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["rows", "all_turns", "turns"])
def _gemm_kernel(
    x,  # [rows, inner]
    words,  # [columns, width] int16
    scale,  # [columns, groups]
    zeros,  # [columns, groups] int8 or None
    bias,  # [columns] or None
    out,  # [rows, columns]
    partial,  # [SPLITS, tiles, BLOCK_N, BLOCK_M] float32 or None
    arrivals,  # [tiles] int32 or None
    rows,
    columns,
    width,
    groups,
    all_turns,
    turns,  # of a split
    stride_x,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # words
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = split * turns
    k = tl.arange(0, BLOCK_K)
    # What lies outside is read again from the last row and not stored.
    mine = tl.minimum(column, columns - 1).to(tl.int64)
    scales = scale + mine * groups
    words += mine[:, None] * width
    # The loop's own loads cannot begin before x is there, so the words of its first turns are sent for here.
    lines = begin * BLOCK_K + tl.arange(0, PREFETCHED_WORDS // LINE) * LINE
    prefetch_constants(words + tl.minimum(lines, width - 1)[None, :], PDL)
    # Scales and zeros are loaded a turn ahead: only operands of products does the compiler load early by itself.
    s = of_groups(scales, begin * BLOCK_K // RUN, PARTS, RUN, GROUP)
    if zeros is not None:
        offsets = zeros + mine * groups
        z = of_groups(offsets, begin * BLOCK_K // RUN, PARTS, RUN, GROUP)
    wait_for_previous(PDL)
    inside = (row < rows)[None, :]
    inputs = x + row.to(tl.int64)[None, :] * stride_x + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(begin, tl.minimum(begin + turns, all_turns)):
        w = tl.load(words + turn * BLOCK_K + k[None, :])
        first = turn * BLOCK_K
        at = inputs + tl.multiple_of(first // RUN * (PARTS * RUN) + first % RUN, 16)
        after = tl.minimum(turn + 1, all_turns - 1) * BLOCK_K // RUN
        next_s = s
        if GROUP != 0:
            next_s = of_groups(scales, after, PARTS, RUN, GROUP)
        if KIND == "int4":
            a, b, c, d = unpack_int4(w, x.dtype.element_ty)
            acc = _multiply(acc, a, at, inside, s[0], None if zeros is None else z[0], GROUP)
            acc = _multiply(acc, b, at + RUN, inside, s[1], None if zeros is None else z[1], GROUP)
            acc = _multiply(acc, c, at + 2 * RUN, inside, s[2], None if zeros is None else z[2], GROUP)
            acc = _multiply(acc, d, at + 3 * RUN, inside, s[3], None if zeros is None else z[3], GROUP)
        else:
            a, b = unpack_bytes(w, KIND, x.dtype.element_ty)
            acc = _multiply(acc, a, at, inside, s[0], None, GROUP)
            acc = _multiply(acc, b, at + RUN, inside, s[1], None, GROUP)
        if zeros is not None:
            z = of_groups(offsets, after, PARTS, RUN, GROUP)
        s = next_s
    if GROUP == 0:
        acc *= s[0][:, None]

    if SPLITS > 1:
        tiles = tl.num_programs(1)
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile.to(tl.int64) * (BLOCK_N * BLOCK_M) + cell
        part = tiles.to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(parts + split * part, acc, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)  # ready for the next launch
            acc = tl.load(parts, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                acc += tl.load(parts + other * part, cache_modifier=".cg")
            _finish(acc, bias, out, row, column, rows, columns)
    else:
        _finish(acc, bias, out, row, column, rows, columns)


@triton.jit
def _multiply(acc, w, inputs, inside, scale, zero, GROUP: tl.constexpr):
    value = tl.load(inputs, mask=inside, other=0.0)  # [BLOCK_K, BLOCK_M]
    if GROUP == 0 and zero is None:
        acc = tl.dot(w, value, acc)
    else:
        part = tl.dot(w, value)
        if zero is not None:
            # Every row of this product is the sum of the inputs, where it is needed; the tensor cores have time for it.
            part -= zero[:, None] * tl.dot(tl.full(w.shape, 1.0, w.dtype), value)
        acc += part if GROUP == 0 else part * scale[:, None]
    return acc


@triton.jit
def _finish(acc, bias, out, row, column, rows, columns):
    """Add the bias, and store the tile [columns, rows] where it belongs."""
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * columns + column[:, None]
    inside = (row < rows)[None, :] & (column < columns)[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@quick_launch
@triton.jit
def _widen_kernel(
    words,  # [columns, width] int16
    scale,  # [columns, groups]
    zeros,  # [columns, groups] int8 or None
    out,  # [columns, PARTS * width]
    columns,
    width,
    groups,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < columns)[:, None]
    row = tl.minimum(row, columns - 1).to(tl.int64)
    k = tl.arange(0, RUN)[None, :]
    w = tl.load(words + row[:, None] * width + block * RUN + k)
    wait_for_previous(PDL)  # whoever read what lies here now has ended
    for j in tl.static_range(PARTS):
        value = code_values(w, j, KIND)
        if zeros is not None:
            value -= of_group(zeros + row * groups, block, j, PARTS, RUN, GROUP)[:, None]
        value *= of_group(scale + row * groups, block, j, PARTS, RUN, GROUP)[:, None]
        place = row[:, None] * (PARTS * width) + (block * PARTS + j) * RUN + k
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
