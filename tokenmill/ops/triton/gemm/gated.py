"""The product of gate and up with its activation behind it, for Hopper: what is gated is never written out.

A warp loads tiles, two warpgroups multiply, each half the rows of a tile: 128 columns of gate beside the same 128 of
up, so that whoever holds a gate's sum also holds that of its up. Programs stay and take tile after tile.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

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

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.gluon_names import release, thread_barrier, tiled, tma_load, tma_store
from tokenmill.ops.triton.launch import ceil_div, quick_launch
from tokenmill.ops.triton.numeric import activate

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
STAGES = 4
GROUP = 16  # row tiles that take turns over the same columns, so that what they share stays in the cache


def gated_gemm(
    x: torch.Tensor,  # [rows, in]; bfloat16 or float16, contiguous
    weight: torch.Tensor,  # [2 * inner, in], of the same dtype: gate, then up
    act: str,  # "silu" or "gelu_tanh"
    group: int = GROUP,
) -> torch.Tensor:  # [rows, inner]
    (rows, width), inner = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = ceil_div(rows, BLOCK_M), ceil_div(inner, BLOCK_N)
    items = row_tiles * column_tiles
    _kernel[(min(items, multiprocessors(x.device)),)](
        tiled(x, [64, BLOCK_K]), tiled(weight, [BLOCK_N, BLOCK_K]), tiled(out, [64, BLOCK_N]),
        inner, row_tiles, column_tiles, items, ceil_div(width, BLOCK_K),
        SILU=act == "silu", STAGES=STAGES, GROUP=group, num_warps=4,
    )  # fmt: skip
    return out


@quick_launch
@gluon.jit(do_not_specialize=["row_tiles", "column_tiles", "items", "turns"])
def _kernel(
    x,  # descriptor of [rows, in], in tiles of [64, 64]
    weight,  # descriptor of [2 * inner, in], in tiles of [128, 64]
    out,  # descriptor of [rows, inner], in tiles of [64, 128]
    inner,
    row_tiles,
    column_tiles,
    items,
    turns,  # of the loop over the inputs
    SILU: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    kind: gl.constexpr = weight.dtype
    a_tiles = gl.allocate_shared_memory(kind, [2 * STAGES, 64, 64], x.layout)
    b_tiles = gl.allocate_shared_memory(kind, [STAGES, 256, 64], weight.layout)  # gate above up
    staging = gl.allocate_shared_memory(kind, [2, 64, 128], out.layout)
    # For each stage: the tiles are there, the tiles are used up.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(2 * i), count=1)
        mbarrier.init(bars.index(2 * i + 1), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (_multiply, (out, a_tiles, b_tiles, staging.index(0), bars, row_tiles, column_tiles, items, turns,
                     0, SILU, STAGES, GROUP)),
        (_multiply, (out, a_tiles, b_tiles, staging.index(1), bars, row_tiles, column_tiles, items, turns,
                     1, SILU, STAGES, GROUP)),
        (_load, (x, weight, a_tiles, b_tiles, bars, inner, row_tiles, column_tiles, items, turns, STAGES, GROUP)),
    ], [4, 1], [232, 40])
    # fmt: on


@gluon.jit
def _place(item, row_tiles, column_tiles, GROUP: gl.constexpr):
    """The first row and the first column of an item's tile."""
    width = GROUP * column_tiles
    first = item // width * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    inside = item % width
    return (first + inside % height) * 128, inside // height * 128


@gluon.jit
def _load(
    x, weight, a_tiles, b_tiles, bars, inner, row_tiles, column_tiles, items, turns,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    # What lies outside of a matrix arrives as zeros, and counts.
    nbytes: gl.constexpr = 2 * weight.block_type.nbytes + 2 * x.block_type.nbytes
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, column = _place(item, row_tiles, column_tiles, GROUP)
        for turn in range(turns):
            stage = step % STAGES
            there = bars.index(2 * stage)
            mbarrier.wait(bars.index(2 * stage + 1), step // STAGES % 2 ^ 1)
            mbarrier.expect(there, nbytes)
            b_tile = b_tiles.index(stage)
            tma_load(weight, [column, turn * 64], there, b_tile.slice(0, 128, 0))
            tma_load(weight, [inner + column, turn * 64], there, b_tile.slice(128, 128, 0))
            tma_load(x, [row, turn * 64], there, a_tiles.index(2 * stage))
            tma_load(x, [row + 64, turn * 64], there, a_tiles.index(2 * stage + 1))
            step += 1


@gluon.jit
def _multiply(
    out, a_tiles, b_tiles, staging, bars, row_tiles, column_tiles, items, turns,
    HALF: gl.constexpr,  # which 64 rows of a tile
    SILU: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, column = _place(item, row_tiles, column_tiles, GROUP)
        acc = gl.zeros([64, 256], gl.float32, layout)
        for turn in range(turns):
            stage = step % STAGES
            mbarrier.wait(bars.index(2 * stage), step // STAGES % 2)
            a_tile = a_tiles.index(2 * stage + HALF)
            acc = warpgroup_mma(a_tile, b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])  # the product before this one has ended
            if turn > 0:
                release(bars.index(2 * ((step - 1) % STAGES) + 1))
            step += 1
        acc = warpgroup_mma_wait(0, [acc])
        release(bars.index(2 * ((step - 1) % STAGES) + 1))
        gate, up = acc.reshape((64, 2, 128)).permute((0, 2, 1)).split()
        # Rounded where separate ops would round: after the product, and after the activation.
        active = activate(gate.to(staging.dtype).to(gl.float32), SILU).to(staging.dtype).to(gl.float32)
        result = (active * up.to(staging.dtype).to(gl.float32)).to(staging.dtype)
        tma.store_wait(0)  # what was staged before has been read
        thread_barrier()
        staging.store(result)
        fence_async_shared()
        thread_barrier()
        tma_store(out, [row + HALF * 64, column], staging)  # leaves out what lies outside
    tma.store_wait(0)
