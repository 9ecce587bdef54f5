"""Products of eight bits with eight bits for Hopper: a warp loads tiles, two warpgroups multiply, each half the rows.

Programs stay and take tile after tile, so what comes next is loaded while a finished tile is scaled and written. Where
there are too few tiles for the device, the inner dimension is cut into parts, and whoever finishes last adds them up.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.gluon_names import release, thread_barrier, tiled, tma_load, tma_store
from tokenmill.ops.triton.launch import ceil_div, quick_launch

BLOCK_M, BLOCK_K = 128, 128
# What choose_hopper_shape counts, in turns of a wide tile's loop, about 0.6 us (scripts/gpu_w8a8.py).
TURN = {256: 1.0, 128: 0.53}
WRITE = {256: 6.6, 128: 2.6}  # to scale and write a tile; wide ones keep their registers longer
MEETING, MEETING_OF_128 = 2.0, 0.08  # where there are parts; and for each 128 columns of one, to store and add it up
LEAST_TURNS = 4  # of a part


@dataclass(frozen=True)
class HopperShape:
    """The columns of a tile (128 or 256), the parts of the inner dimension, and the pipeline."""

    block_n: int
    splits: int
    stages: int
    group: int  # row tiles that take turns over the same columns, so that what they share stays in the cache


SHAPES = [HopperShape(n, splits, 4 if n == 256 else 6, 16) for splits in (1, 2, 4, 8) for n in (256, 128)]


@lru_cache(maxsize=1024)
def choose_hopper_shape(rows: int, columns: int, inner: int, counters: int, device: torch.device) -> HopperShape:
    """The one that should end first: rounds of all multiprocessors, times the turns of a program in each.

    Its numbers are fitted to Llama-3-8B's sizes on an H200: there its tiles and parts are within 2% of the best that
    was measured (tests/ops/test_triton_int8.py). Of groups none was better for sure.
    """
    row_tiles, turns = ceil_div(rows, BLOCK_M), ceil_div(inner, BLOCK_K)

    def cost(shape: HopperShape) -> float:
        items = row_tiles * ceil_div(columns, shape.block_n) * shape.splits
        length = ceil_div(turns, shape.splits) * TURN[shape.block_n] + WRITE[shape.block_n]
        meeting = 0.0 if shape.splits == 1 else MEETING + MEETING_OF_128 * items * shape.block_n / 128
        return ceil_div(items, multiprocessors(device)) * length + meeting

    def can_meet(shape: HopperShape) -> bool:
        enough = counters >= 2 * row_tiles * ceil_div(columns, shape.block_n)
        return shape.splits == 1 or (enough and turns >= LEAST_TURNS * shape.splits)

    return min(filter(can_meet, SHAPES), key=cost)


def hopper_gemm(
    values: torch.Tensor,  # [rows, inner] int8 or float8_e4m3fn
    x_scale: torch.Tensor,  # [rows] float32
    weight: torch.Tensor,  # [columns, inner], of the same dtype
    scale: torch.Tensor,  # [columns] float32
    bias: torch.Tensor | None,  # [columns]
    counters: torch.Tensor,  # [2 * tiles] int32 zeros, zero again afterwards, where there are parts
    dtype: torch.dtype,  # of the result
    shape: HopperShape | None = None,  # by default chosen by rule
) -> torch.Tensor:  # [rows, columns]
    (rows, inner), columns = values.shape, weight.shape[0]
    shape = shape or choose_hopper_shape(rows, columns, inner, counters.numel(), values.device)
    out = torch.empty(rows, columns, dtype=dtype, device=values.device)
    row_tiles, turns = ceil_div(rows, BLOCK_M), ceil_div(inner, BLOCK_K)
    tiles = row_tiles * ceil_div(columns, shape.block_n)
    splits = ceil_div(turns, ceil_div(turns, shape.splits))  # no part may be empty
    partial = None
    if splits > 1:
        assert counters.numel() >= 2 * tiles
        sums = torch.int32 if values.dtype == torch.int8 else torch.float32
        partial = torch.empty(splits, tiles, BLOCK_M * shape.block_n, dtype=sums, device=values.device)
    items = tiles * splits
    _kernel[(min(items, multiprocessors(values.device)),)](
        tiled(values, [64, BLOCK_K]), tiled(weight, [shape.block_n, BLOCK_K]), tiled(out, [64, 128]),
        x_scale, scale, bias, partial, counters, rows, columns, row_tiles, items, turns,
        SPLITS=splits, BLOCK_N=shape.block_n, STAGES=shape.stages, GROUP=shape.group, num_warps=4,
    )  # fmt: skip
    return out


@quick_launch
@gluon.jit(do_not_specialize=["rows", "row_tiles", "items", "turns"])
def _kernel(
    x,  # descriptor of [rows, inner], in tiles of [64, 128]
    weight,  # descriptor of [columns, inner], in tiles of [BLOCK_N, 128]
    out,  # descriptor of [rows, columns], in tiles of [64, 128]
    x_scale,  # [rows]
    scale,  # [columns]
    bias,  # [columns] or None
    partial,  # [SPLITS, tiles, 2, 64 * BLOCK_N] int32 or float32; or None
    counters,  # [tiles, 2]
    rows,
    columns,
    row_tiles,
    items,  # tiles x parts
    turns,  # of the loop over the inner dimension
    SPLITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr = False,
):
    if PDL:
        gdc_launch_dependents()
    kind: gl.constexpr = weight.dtype
    a_tiles = gl.allocate_shared_memory(kind, [2 * STAGES, 64, 128], x.layout)
    b_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, 128], weight.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2, 64, 128], out.layout)
    # For each stage: the tiles are there, the tiles are used up.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(2 * i), count=1)
        mbarrier.init(bars.index(2 * i + 1), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (_multiply, (out, x_scale, scale, bias, partial, counters, a_tiles, b_tiles, staging.index(0), bars,
                     rows, columns, row_tiles, items, turns, 0, SPLITS, BLOCK_N, STAGES, GROUP, PDL)),
        (_multiply, (out, x_scale, scale, bias, partial, counters, a_tiles, b_tiles, staging.index(1), bars,
                     rows, columns, row_tiles, items, turns, 1, SPLITS, BLOCK_N, STAGES, GROUP, PDL)),
        (_load, (x, weight, a_tiles, b_tiles, bars, columns, row_tiles, items, turns,
                 SPLITS, BLOCK_N, STAGES, GROUP, PDL)),
    ], [4, 1], [232, 40])
    # fmt: on


@gluon.jit
def _place(item, columns, row_tiles, SPLITS: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    """The number of an item's tile, its first row and its first column."""
    tile = item // SPLITS
    width = GROUP * gl.cdiv(columns, BLOCK_N)
    first = tile // width * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    inside = tile % width
    return tile, (first + inside % height) * 128, inside // height * BLOCK_N


@gluon.jit
def _part(item, turns, SPLITS: gl.constexpr):
    """The turns of an item, from the first to before the last."""
    length = gl.cdiv(turns, SPLITS)
    begin = item % SPLITS * length
    return begin, gl.minimum(begin + length, turns)


@gluon.jit
def _load(
    x, weight, a_tiles, b_tiles, bars, columns, row_tiles, items, turns,
    SPLITS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # What lies outside of a matrix arrives as zeros, and counts.
    nbytes: gl.constexpr = weight.block_type.nbytes + 2 * x.block_type.nbytes
    # The weight is a constant: its first tiles are on their way while the previous kernel still makes x.
    _, _, column = _place(gl.program_id(0), columns, row_tiles, SPLITS, BLOCK_N, GROUP)
    begin, end = _part(gl.program_id(0), turns, SPLITS)
    ahead = gl.minimum(end - begin, STAGES)
    for stage in range(ahead):
        mbarrier.expect(bars.index(2 * stage), nbytes)
        tma_load(weight, [column, (begin + stage) * 128], bars.index(2 * stage), b_tiles.index(stage))
    if PDL:
        gdc_wait()
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, row, column = _place(item, columns, row_tiles, SPLITS, BLOCK_N, GROUP)
        begin, end = _part(item, turns, SPLITS)
        for turn in range(begin, end):
            stage = step % STAGES
            there = bars.index(2 * stage)
            if step >= ahead:
                mbarrier.wait(bars.index(2 * stage + 1), step // STAGES % 2 ^ 1)
                mbarrier.expect(there, nbytes)
                tma_load(weight, [column, turn * 128], there, b_tiles.index(stage))
            tma_load(x, [row, turn * 128], there, a_tiles.index(2 * stage))
            tma_load(x, [row + 64, turn * 128], there, a_tiles.index(2 * stage + 1))
            step += 1


@gluon.jit
def _multiply(
    out, x_scale, scale, bias, partial, counters, a_tiles, b_tiles, staging, bars,
    rows, columns, row_tiles, items, turns,
    HALF: gl.constexpr,  # which 64 rows of a tile
    SPLITS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    integers: gl.constexpr = a_tiles.dtype == gl.int8
    sums: gl.constexpr = gl.int32 if integers else gl.float32
    # Triton has no instruction for 256 columns of integers: then there are two, of 128 each.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 if integers else BLOCK_N, 32])
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, row, column = _place(item, columns, row_tiles, SPLITS, BLOCK_N, GROUP)
        begin, end = _part(item, turns, SPLITS)
        acc = gl.zeros([64, BLOCK_N], sums, layout)
        for turn in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(bars.index(2 * stage), step // STAGES % 2)
            a_tile = a_tiles.index(2 * stage + HALF)
            acc = warpgroup_mma(a_tile, b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])  # the product before this one has ended
            if turn > begin:
                release(bars.index(2 * ((step - 1) % STAGES) + 1))
            step += 1
        acc = warpgroup_mma_wait(0, [acc])
        release(bars.index(2 * ((step - 1) % STAGES) + 1))
        halves = acc.reshape((64, 2, 128)).permute((0, 2, 1)).split() if BLOCK_N == 256 else (acc,)
        at = row + HALF * 64
        if SPLITS == 1:
            for i in gl.static_range(BLOCK_N // 128):
                _write(halves[i], staging, out, x_scale, scale, bias, at, column + i * 128, rows, columns)
        else:
            mine = partial + (tile * 2 + HALF).to(gl.int64) * (64 * BLOCK_N)
            part = (items // SPLITS).to(gl.int64) * (128 * BLOCK_N)
            kept: gl.constexpr = halves[0].type.layout
            cells = _cells(kept)
            for i in gl.static_range(BLOCK_N // 128):
                gl.store(mine + item % SPLITS * part + i * (64 * 128) + cells, halves[i], cache_modifier=".cg")
            thread_barrier()  # every thread's sums are written before the arrival is counted
            counter = counters + tile * 2 + HALF
            if gl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                gl.store(counter, 0)  # ready for the next launch
                for i in gl.static_range(BLOCK_N // 128):
                    total = gl.load(mine + i * (64 * 128) + cells, cache_modifier=".cg")
                    for other in gl.static_range(1, SPLITS):
                        total += gl.load(mine + other * part + i * (64 * 128) + cells, cache_modifier=".cg")
                    _write(total, staging, out, x_scale, scale, bias, at, column + i * 128, rows, columns)
    tma.store_wait(0)


@gluon.jit
def _cells(layout: gl.constexpr):
    """Where 64 x 128 sums lie: eight columns at a time, so that what a warp stores together lies together."""
    n = gl.arange(0, 128, gl.SliceLayout(0, layout))
    return gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * 8 + (n // 8 * 512 + n % 8)[None, :]


@gluon.jit
def _write(sums, staging, out, x_scale, scale, bias, row, column, rows, columns):
    """Scale 64 x 128 sums, add the bias, and let the copy engine write them; it leaves out what lies outside."""
    layout: gl.constexpr = sums.type.layout
    m = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = column + gl.arange(0, 128, gl.SliceLayout(0, layout))
    result = sums.to(gl.float32) * gl.load(scale + n, mask=n < columns, other=0.0)[None, :]
    result *= gl.load(x_scale + m, mask=m < rows, other=0.0)[:, None]
    if bias is not None:
        result += gl.load(bias + n, mask=n < columns, other=0.0).to(gl.float32)[None, :]
    tma.store_wait(0)  # what was staged before has been read
    thread_barrier()
    staging.store(result.to(staging.dtype))
    fence_async_shared()
    thread_barrier()
    tma_store(out, [row, column], staging)
