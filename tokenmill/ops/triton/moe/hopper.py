"""Grouped products for Hopper: one warpgroup loads tiles, two multiply, each half the rows of a tile of 128 x 256.

Programs stay and take tile after tile, so what comes next is loaded while a finished tile is written. An expert's last
tile is often less than half full: then the second warpgroup has no rows and the tile takes half the time.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.gluon_names import copy_async, release, thread_barrier, tiled, tma_load
from tokenmill.ops.triton.launch import ceil_div, quick_launch
from tokenmill.ops.triton.moe.route import ExpertGroups

BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4


def fits(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether these kernels can compute this mixture: in 16 bits, aligned, in whole steps of depth."""
    aligned = gate_up.is_contiguous() and down.is_contiguous() and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    whole = gate_up.shape[2] % BLOCK_K == down.shape[2] % BLOCK_K == 0
    return x.dtype in (torch.bfloat16, torch.float16) and aligned and whole


def gate_up_rows_hopper(
    x: torch.Tensor,  # [tokens, hidden]
    groups: ExpertGroups,
    k: int,
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    kind: str,
) -> torch.Tensor:  # [choices, inner], in the order of the groups
    inner = gate_up.shape[1] // 2
    out = torch.empty(groups.order.shape[0], inner, dtype=x.dtype, device=x.device)
    _launch(x, groups, gate_up, out, x.stride(0), inner, kind == "silu", k)
    return out


def down_rows_hopper(
    active: torch.Tensor,  # [choices, inner], in the order of the groups
    groups: ExpertGroups,
    down: torch.Tensor,  # [experts, hidden, inner]
) -> torch.Tensor:  # [choices, hidden], in the order of the tokens
    out = torch.empty(active.shape[0], down.shape[1], dtype=active.dtype, device=active.device)
    _launch(tiled(active, [64, BLOCK_K]), groups, down, out, active.stride(0), down.shape[1], None, 1)
    return out


def _launch(
    rows: Any,  # a tensor whose rows are gathered, or a descriptor of rows that are in order
    groups: ExpertGroups,
    weights: torch.Tensor,
    out: torch.Tensor,
    stride_row: int,
    columns: int,
    silu: bool | None,  # None: no activation
    places: int,
) -> None:
    assert groups.block_m == BLOCK_M
    gated = silu is not None
    across = ceil_div(columns, BLOCK_N // 2 if gated else BLOCK_N)
    items = groups.max_tiles * across
    weight_tiles = tiled(weights.flatten(0, 1), [128 if gated else 256, BLOCK_K])
    _kernel[(min(items, multiprocessors(out.device)),)](
        rows, groups.order, groups.tiles, weight_tiles, out, stride_row, items,
        DEPTH=weights.shape[2], COLUMNS=columns, ACROSS=across, PLACES=places, GATED=gated, SILU=bool(silu),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


@quick_launch
@gluon.jit(do_not_specialize=["items"])
def _kernel(
    rows,  # GATED: [tokens, DEPTH], taken by `order`; else descriptor of [choices, DEPTH], in order, 64 rows a tile
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    weights,  # descriptor of [experts * rows of one, DEPTH]
    out,  # GATED: [choices, COLUMNS], in order; else by `order`
    stride_row,
    items,  # tiles x blocks of columns
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACROSS: gl.constexpr,
    PLACES: gl.constexpr,
    GATED: gl.constexpr,  # the weights are gate, then up; else one matrix
    SILU: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    kind: gl.constexpr = weights.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_K], kind)
    staging_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], kind)
    a_tiles = gl.allocate_shared_memory(kind, [2 * STAGES, 64, BLOCK_K], a_layout)
    b_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_K], weights.layout)
    staging = gl.allocate_shared_memory(kind, [2, 64, 128], staging_layout)
    # For each stage: the tiles are there, the tiles are used up.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # The copy engine arrives once; where rows are gathered, each thread that gathers arrives, too.
        mbarrier.init(bars.index(2 * i), count=129 if GATED else 1)
        mbarrier.init(bars.index(2 * i + 1), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize([
        (_multiply, (order, tiles, out, a_tiles, b_tiles, staging.index(0), bars, items,
                     0, DEPTH, COLUMNS, ACROSS, GATED, SILU, BLOCK_N, BLOCK_K, STAGES)),
        (_multiply, (order, tiles, out, a_tiles, b_tiles, staging.index(1), bars, items,
                     1, DEPTH, COLUMNS, ACROSS, GATED, SILU, BLOCK_N, BLOCK_K, STAGES)),
        (_load, (rows, order, tiles, weights, a_tiles, b_tiles, bars, stride_row, items,
                 DEPTH, COLUMNS, ACROSS, PLACES, GATED, BLOCK_N, BLOCK_K, STAGES)),
    ], [4, 4], [216, 64])
    # fmt: on


@gluon.jit
def _item(tiles, item, ACROSS: gl.constexpr):
    """The expert, its rows from the tile's first to its own last, and the block of columns."""
    entry = tiles + item // ACROSS * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), item % ACROSS


@gluon.jit
def _load(
    rows, order, tiles, weights, a_tiles, b_tiles, bars, stride_row, items,
    DEPTH: gl.constexpr, COLUMNS: gl.constexpr, ACROSS: gl.constexpr, PLACES: gl.constexpr, GATED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    half: gl.constexpr = BLOCK_N // 2
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, first, end, column = _item(tiles, item, ACROSS)
        if first < end:
            both = first + 64 < end
            if GATED:
                upper = _row_places(rows, order, first, end, stride_row, PLACES, BLOCK_K, layout)
                lower = _row_places(rows, order, first + 64, end, stride_row, PLACES, BLOCK_K, layout)
            for k in range(0, DEPTH, BLOCK_K):
                stage = step % STAGES
                there = bars.index(2 * stage)
                mbarrier.wait(bars.index(2 * stage + 1), step // STAGES % 2 ^ 1)
                b_tile = b_tiles.index(stage)
                if GATED:
                    row = expert * (2 * COLUMNS) + column * half
                    mbarrier.expect(there, 2 * weights.block_type.nbytes)
                    tma_load(weights, [row, k], there, b_tile.slice(0, half))
                    tma_load(weights, [row + COLUMNS, k], there, b_tile.slice(half, half))
                    copy_async(a_tiles.index(2 * stage), upper + k)
                    if both:
                        copy_async(a_tiles.index(2 * stage + 1), lower + k)
                    async_copy.mbarrier_arrive(there, increment_count=False)
                else:
                    row = expert * COLUMNS + column * BLOCK_N
                    mbarrier.expect(there, weights.block_type.nbytes + 2 * rows.block_type.nbytes)
                    tma_load(weights, [row, k], there, b_tile)
                    tma_load(rows, [first, k], there, a_tiles.index(2 * stage))
                    tma_load(rows, [first + 64, k], there, a_tiles.index(2 * stage + 1))
                step += 1


@gluon.jit
def _row_places(rows, order, first, end, stride_row, PLACES: gl.constexpr, BLOCK_K: gl.constexpr, layout: gl.constexpr):
    """Where the 64 rows of a tile begin [64, BLOCK_K]; what is past the end is read from the last row."""
    row = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, layout)), end - 1)
    token = gl.load(order + row) // PLACES
    return rows + token.to(gl.int64)[:, None] * stride_row + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _multiply(
    order, tiles, out, a_tiles, b_tiles, staging, bars, items,
    HALF: gl.constexpr,  # which 64 rows of a tile
    DEPTH: gl.constexpr, COLUMNS: gl.constexpr, ACROSS: gl.constexpr, GATED: gl.constexpr, SILU: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    write_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    step = 0
    _, next_first, next_end, next_column = _item(tiles, gl.program_id(0), ACROSS)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        first = next_first + HALF * 64
        end = next_end
        column = next_column
        empty = next_first >= next_end
        # On its way while this tile is multiplied.
        _, next_first, next_end, next_column = _item(tiles, gl.minimum(item + gl.num_programs(0), items - 1), ACROSS)
        if first < end:
            row = first + gl.arange(0, 64, gl.SliceLayout(1, write_layout))
            inside = row < end
            to = row
            if not GATED:
                to = gl.load(order + row, mask=inside, other=0)
            acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
            for i in range(DEPTH // BLOCK_K):
                stage = step % STAGES
                mbarrier.wait(bars.index(2 * stage), step // STAGES % 2)
                if GATED:
                    fence_async_shared()  # gathered rows were written by threads, and are read by the tensor cores
                a_tile = a_tiles.index(2 * stage + HALF)
                acc = warpgroup_mma(a_tile, b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, [acc])  # the product before this one has ended
                if i > 0:
                    release(bars.index(2 * ((step - 1) % STAGES) + 1))
                step += 1
            acc = warpgroup_mma_wait(0, [acc])
            release(bars.index(2 * ((step - 1) % STAGES) + 1))
            left, right = acc.reshape((64, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
            if GATED:
                _write(activate(left, SILU) * right, staging, out, to, inside, column * 128, COLUMNS, write_layout)
            else:
                at = column * BLOCK_N
                _write(left, staging, out, to, inside, at, COLUMNS, write_layout)
                _write(right, staging, out, to, inside, at + 128, COLUMNS, write_layout)
        elif not empty:
            for _ in range(DEPTH // BLOCK_K):  # no rows for this half: the tiles are for the other one
                mbarrier.wait(bars.index(2 * (step % STAGES)), step // STAGES % 2)
                release(bars.index(2 * (step % STAGES) + 1))
                step += 1


@gluon.jit
def activate(gate, SILU: gl.constexpr):
    if SILU:
        return gate / (1.0 + gl.exp(-gate))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + gl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(inner)), written as a sigmoid


@gluon.jit
def _write(result, staging, out, to, inside, at, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """64 x 128 results to their rows, through shared memory, so that whole lines are written."""
    thread_barrier()  # what was staged before has been read
    staging.store(result.to(staging.dtype))
    thread_barrier()
    n = at + gl.arange(0, 128, gl.SliceLayout(0, layout))
    mask = inside[:, None] & (n < COLUMNS)[None, :]
    gl.store(out + to.to(gl.int64)[:, None] * COLUMNS + n[None, :], staging.load(layout), mask=mask)
