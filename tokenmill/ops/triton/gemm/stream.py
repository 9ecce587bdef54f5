"""Products of a few rows for Hopper: the weight streams through shared memory, from before its inputs are there on.

A warp sends for tiles of the weight while the kernel before still computes the inputs; a warpgroup multiplies the
weight from the left, so that few rows waste little. All programs run at once and have the same share: 64 rows of the
weight, some rows of the inputs, and a part of the inner dimension. Whoever ends last of those with the same rows adds
the parts up, always in the same order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.gemm.gated_few import BLOCK_K, SHARED_BYTES
from tokenmill.ops.triton.gluon_names import release, thread_barrier, tiled, tma_load
from tokenmill.ops.triton.launch import ceil_div, quick_launch

STAGES = 16  # of tiles on their way, at most
# What choose_splits counts, in microseconds: a turn, the meeting of parts, and each part; by the rows of a tile.
TURN, MEETING, PART = {16: 0.11, 32: 0.14, 64: 0.15}, 1.2, {16: 0.15, 32: 0.5, 64: 0.5}
BYTES = 4.2e6  # of weights, that a microsecond brings at best
FEW_PROGRAMS = 48  # with so few tiles of 32 rows they are better than half as many of 64


@lru_cache(maxsize=1024)
def choose_splits(rows: int, columns: int, inner: int, device: torch.device) -> int:
    """Parts of the inner dimension: more while all programs run at once and a shorter loop pays for the meeting."""
    turns, padded = ceil_div(inner, BLOCK_K), rows_of_a_tile(rows, columns)
    at_best = 2 * columns * inner / BYTES if padded == 64 else 0.0  # fewer rows leave less to do beside the loads

    def cost(splits: int) -> float:
        meeting = 0.0 if splits == 1 else MEETING + PART[padded] * splits
        return max(TURN[padded] * ceil_div(turns, splits), at_best) + meeting

    tiles = ceil_div(columns, 64) * ceil_div(rows, padded)
    most = max(1, min(multiprocessors(device) // tiles, turns))
    splits = min(range(1, most + 1), key=cost)
    return ceil_div(turns, ceil_div(turns, splits))  # no part may be empty


def rows_of_a_tile(rows: int, columns: int) -> int:
    if rows <= 32:
        return 16 if rows <= 16 else 32
    return 32 if rows <= 128 and ceil_div(columns, 64) * ceil_div(rows, 32) <= FEW_PROGRAMS else 64


def stream_gemm(
    x: torch.Tensor,  # [rows, inner], up to 256; bfloat16 or float16, contiguous
    weight: torch.Tensor,  # [columns, inner], of the same dtype
    bias: torch.Tensor | None,  # [columns]
    counters: torch.Tensor | None,  # [tiles] int32 zeros, zero again afterwards; None: no parts
    splits: int | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [rows, columns]
    (rows, inner), columns = x.shape, weight.shape[0]
    splits = 1 if counters is None else splits or choose_splits(rows, columns, inner, x.device)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    padded = rows_of_a_tile(rows, columns)
    row_tiles, turns = ceil_div(rows, padded), ceil_div(inner, BLOCK_K)
    tiles = ceil_div(columns, 64) * row_tiles
    partial = None
    if splits > 1:
        assert counters is not None and counters.numel() >= tiles
        partial = torch.empty(tiles * splits * 64 * padded, dtype=torch.float32, device=x.device)
    stages = min(STAGES, SHARED_BYTES // (2 * BLOCK_K * (64 + padded)))
    _kernel[(tiles * splits,)](
        tiled(x, [padded, BLOCK_K]), tiled(weight, [64, BLOCK_K]), bias, out, partial, counters, rows, columns, turns,
        row_tiles, SPLITS=splits, ROWS=padded, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return out


@quick_launch
@gluon.jit(do_not_specialize=["rows", "turns", "row_tiles"])
def _kernel(
    x,  # descriptor of [rows, inner], in tiles of [ROWS, 64]
    weight,  # descriptor of [columns, inner], in tiles of [64, 64]
    bias,  # [columns] or None
    out,  # [rows, columns]
    partial,  # [tiles, SPLITS, 64, ROWS] float32, or None
    counters,  # [tiles], or None
    rows,
    columns,
    turns,  # of the loop over the inputs
    row_tiles,  # neighbours have the same rows of the weight
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr = False,
):
    if PDL:
        gdc_launch_dependents()
    a_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, 64, 64], weight.layout)
    b_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, 64], x.layout)
    # For each stage: the tiles are there, the tiles are used up.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (_multiply, (bias, out, partial, counters, a_tiles, b_tiles, bars, rows, columns, turns, row_tiles,
                     SPLITS, ROWS, STAGES, PDL)),
        (_load, (x, weight, a_tiles, b_tiles, bars, turns, row_tiles, SPLITS, ROWS, STAGES, PDL)),
    ], [1], [40])
    # fmt: on


@gluon.jit
def _part(turns, SPLITS: gl.constexpr):
    """The turns of this program, from the first to before the last."""
    length = gl.cdiv(turns, SPLITS)
    begin = gl.program_id(0) % SPLITS * length
    return begin, gl.minimum(begin + length, turns)


@gluon.jit
def _load(
    x, weight, a_tiles, b_tiles, bars, turns, row_tiles,
    SPLITS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # What lies outside of a matrix arrives as zeros, and counts.
    nbytes: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    tile = gl.program_id(0) // SPLITS
    row, first = tile // row_tiles * 64, tile % row_tiles * ROWS
    begin, end = _part(turns, SPLITS)
    # The weight is a constant: its first tiles are on their way while the previous kernel still makes x.
    ahead = gl.minimum(end - begin, STAGES)
    for stage in range(ahead):
        mbarrier.expect(bars.index(2 * stage), nbytes)
        tma_load(weight, [row, (begin + stage) * 64], bars.index(2 * stage), a_tiles.index(stage))
    if PDL:
        gdc_wait()
    for step in range(end - begin):
        stage = step % STAGES
        there = bars.index(2 * stage)
        if step >= ahead:
            mbarrier.wait(bars.index(2 * stage + 1), step // STAGES % 2 ^ 1)
            mbarrier.expect(there, nbytes)
            tma_load(weight, [row, (begin + step) * 64], there, a_tiles.index(stage))
        tma_load(x, [first, (begin + step) * 64], there, b_tiles.index(stage))


@gluon.jit
def _multiply(
    bias, out, partial, counters, a_tiles, b_tiles, bars, rows, columns, turns, row_tiles,
    SPLITS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if PDL:
        gdc_wait()
    tile = gl.program_id(0) // SPLITS
    begin, end = _part(turns, SPLITS)
    sums = gl.zeros([64, ROWS], gl.float32, layout)
    for step in range(end - begin):
        stage = step % STAGES
        mbarrier.wait(bars.index(2 * stage), step // STAGES % 2)
        sums = warpgroup_mma(a_tiles.index(stage), b_tiles.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, [sums])  # the product before this one has ended
        if step > 0:
            release(bars.index(2 * ((step - 1) % STAGES) + 1))
    sums = warpgroup_mma_wait(0, [sums])
    if SPLITS == 1:
        _write(sums, bias, out, tile, rows, columns, row_tiles, ROWS)
    else:
        n = gl.arange(0, 64, gl.SliceLayout(1, layout))
        cells = n[:, None] * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
        gl.store(partial + gl.program_id(0).to(gl.int64) * (64 * ROWS) + cells, sums, cache_modifier=".cg")
        thread_barrier()  # every thread's sums are written before the arrival is counted
        if gl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            gl.store(counters + tile, 0)  # ready for the next launch
            parts = partial + (tile * SPLITS).to(gl.int64) * (64 * ROWS) + cells
            total = gl.load(parts, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                total += gl.load(parts + other * (64 * ROWS), cache_modifier=".cg")
            _write(total, bias, out, tile, rows, columns, row_tiles, ROWS)


@gluon.jit
def _write(sums, bias, out, tile, rows, columns, row_tiles, ROWS: gl.constexpr):
    layout: gl.constexpr = sums.type.layout
    n = tile // row_tiles * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    m = tile % row_tiles * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    if bias is not None:
        sums += gl.load(bias + n, mask=n < columns, other=0.0).to(gl.float32)[:, None]
    place = m.to(gl.int64)[None, :] * columns + n[:, None]
    gl.store(out + place, sums.to(out.dtype.element_ty), mask=(n < columns)[:, None] & (m < rows)[None, :])
