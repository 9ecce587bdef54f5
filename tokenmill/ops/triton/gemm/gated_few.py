"""The product of gate and up with its activation, of a few rows, for Hopper: the weight is read once at memory speed.

Every program has the same share of the weight, so that all end together: one wave. A warp streams it through shared
memory from before the previous kernel has ended on, and a warpgroup multiplies it from the left. Eight rows of gate lie
above the same eight of up, which is how a thread comes to hold both sums.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# ruff: noqa: RUF005  # Gluon knows sums of tuples, not what stands for them

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.triton.gluon_names import reinterpret, release, tiled, tma_load
from tokenmill.ops.triton.launch import ceil_div, quick_launch
from tokenmill.ops.triton.numeric import activate

BLOCK_K = 64
MOST_ROWS = 128  # of x
OCTETS = 4  # of gate, and as many of up, in the 64 rows of a tile
SHARED_BYTES = 220 << 10  # for tiles on their way
MOST_TILES = 5  # that a program multiplies at a time: registers hold their sums


@dataclass(frozen=True)
class FewShape:
    """A program's share: octets of gate (and of up) in each of its passes over x."""

    octets: int
    passes: int
    programs: int
    rows: int  # of x, that a warpgroup multiplies
    halves: int  # warpgroups
    stages: int


@lru_cache(maxsize=1024)
def choose_few_shape(rows: int, inner: int, device: torch.device) -> FewShape:
    octets = inner // 8
    share = ceil_div(octets, multiprocessors(device))
    passes = ceil_div(share, MOST_TILES * OCTETS)
    each = ceil_div(share, passes)
    padded = next(size for size in (16, 32, 64, 128) if rows <= size)
    stage = BLOCK_K * 2 * (ceil_div(each, OCTETS) * 64 + padded)
    halves = 2 if padded == 128 else 1
    stages = min(8, SHARED_BYTES // stage)
    return FewShape(each, passes, ceil_div(octets, each * passes), padded // halves, halves, stages)


def gated_few(
    x: torch.Tensor,  # [rows, in], up to 128; bfloat16 or float16, contiguous
    weight: torch.Tensor,  # [2 * inner, in], of the same dtype: gate, then up; inner is a multiple of 8
    act: str,  # "silu" or "gelu_tanh"
) -> torch.Tensor:  # [rows, inner]
    (rows, width), inner = x.shape, weight.shape[0] // 2
    shape = choose_few_shape(rows, inner, x.device)
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    _kernel[(shape.programs,)](
        tiled(x, [shape.rows, BLOCK_K]), _interleaved(weight, OCTETS), _interleaved(weight, 1), out,
        rows, inner, ceil_div(width, BLOCK_K), shape.passes,
        OCTETS_EACH=shape.octets, ROWS=shape.rows, HALVES=shape.halves, SILU=act == "silu", STAGES=shape.stages,
        num_warps=4,
    )  # fmt: skip
    return out


def _interleaved(weight: torch.Tensor, octets: int) -> Any:
    """A descriptor of tiles of eight rows of gate, the same eight of up, the next eight of gate ..."""
    width, inner = weight.shape[1], weight.shape[0] // 2
    shape, strides = [inner // 8, 2, 8, width], [8 * width, inner * width, width, 1]
    block = [octets, 2, 8, BLOCK_K]
    return TensorDescriptor(weight, shape, strides, block, _layout())


@lru_cache
def _layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@quick_launch
@gluon.jit(do_not_specialize=["rows", "turns", "passes"])
def _kernel(
    x,  # descriptor of [rows, in], in tiles of [ROWS, 64]
    weight,  # descriptor of [inner / 8, 2, 8, in], in tiles of [4, 2, 8, 64]
    octet,  # the same, in tiles of [1, 2, 8, 64]
    out,  # [rows, inner]
    rows,
    inner,
    turns,  # of the loop over the inputs
    passes,
    OCTETS_EACH: gl.constexpr,
    ROWS: gl.constexpr,
    HALVES: gl.constexpr,
    SILU: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr = False,
):
    if PDL:
        gdc_launch_dependents()
    kind: gl.constexpr = weight.dtype
    TILES: gl.constexpr = (OCTETS_EACH + 3) // 4
    a_tiles = gl.allocate_shared_memory(kind, [STAGES * TILES, 64, 64], x.layout)
    b_tiles = gl.allocate_shared_memory(kind, [STAGES * HALVES, ROWS, 64], x.layout)
    # For each stage: the tiles are there, the tiles are used up.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(2 * i), count=1)
        mbarrier.init(bars.index(2 * i + 1), count=HALVES)
    fence_async_shared()
    # fmt: off
    if HALVES == 1:
        gl.warp_specialize([
            (_multiply, (out, a_tiles, b_tiles, bars, rows, inner, turns, passes,
                         0, OCTETS_EACH, ROWS, HALVES, SILU, STAGES, PDL)),
            (_load, (x, weight, octet, a_tiles, b_tiles, bars, turns, passes, OCTETS_EACH, ROWS, HALVES, STAGES, PDL)),
        ], [1], [40])
    else:
        gl.warp_specialize([
            (_multiply, (out, a_tiles, b_tiles, bars, rows, inner, turns, passes,
                         0, OCTETS_EACH, ROWS, HALVES, SILU, STAGES, PDL)),
            (_multiply, (out, a_tiles, b_tiles, bars, rows, inner, turns, passes,
                         1, OCTETS_EACH, ROWS, HALVES, SILU, STAGES, PDL)),
            (_load, (x, weight, octet, a_tiles, b_tiles, bars, turns, passes, OCTETS_EACH, ROWS, HALVES, STAGES, PDL)),
        ], [4, 1], [232, 40])
    # fmt: on


@gluon.jit
def _load_weight(weight, octet, a_tiles, bar, stage, first, turn, OCTETS_EACH: gl.constexpr):
    """The tiles of a turn: whole ones, and the rest octet by octet."""
    TILES: gl.constexpr = (OCTETS_EACH + 3) // 4
    WHOLE: gl.constexpr = OCTETS_EACH // 4
    for i in gl.static_range(WHOLE):
        tile = reinterpret(a_tiles.index(stage * TILES + i), weight.dtype, [4, 2, 8, 64], weight.layout)
        tma_load(weight, [first + 4 * i, 0, 0, turn * 64], bar, tile)
    for i in gl.static_range(OCTETS_EACH - 4 * WHOLE):
        rest = a_tiles.index(stage * TILES + WHOLE).slice(16 * i, 16, 0)
        tile = reinterpret(rest, weight.dtype, [1, 2, 8, 64], octet.layout)
        tma_load(octet, [first + 4 * WHOLE + i, 0, 0, turn * 64], bar, tile)


@gluon.jit
def _load(
    x, weight, octet, a_tiles, b_tiles, bars, turns, passes,
    OCTETS_EACH: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # What lies outside of a matrix arrives as zeros, and counts.
    nbytes: gl.constexpr = OCTETS_EACH * 16 * 64 * 2 + HALVES * x.block_type.nbytes
    # The weight is a constant: its first tiles are on their way while the previous kernel still makes x.
    first = gl.program_id(0) * passes * OCTETS_EACH
    ahead = gl.minimum(turns, STAGES)
    for stage in range(ahead):
        mbarrier.expect(bars.index(2 * stage), nbytes)
        _load_weight(weight, octet, a_tiles, bars.index(2 * stage), stage, first, stage, OCTETS_EACH)
    if PDL:
        gdc_wait()
    step = 0
    for i in range(passes):
        for turn in range(turns):
            stage = step % STAGES
            there = bars.index(2 * stage)
            if step >= ahead:
                mbarrier.wait(bars.index(2 * stage + 1), step // STAGES % 2 ^ 1)
                mbarrier.expect(there, nbytes)
                _load_weight(weight, octet, a_tiles, there, stage, first + i * OCTETS_EACH, turn, OCTETS_EACH)
            for half in gl.static_range(HALVES):
                tma_load(x, [half * ROWS, turn * 64], there, b_tiles.index(stage * HALVES + half))
            step += 1


@gluon.jit
def _multiply(
    out, a_tiles, b_tiles, bars, rows, inner, turns, passes,
    HALF: gl.constexpr,  # which rows of x
    OCTETS_EACH: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr, SILU: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = (OCTETS_EACH + 3) // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if PDL:
        gdc_wait()
    step = 0
    for i in range(passes):
        accs = _zeros(TILES, ROWS, layout)
        for _ in range(turns):
            stage = step % STAGES
            mbarrier.wait(bars.index(2 * stage), step // STAGES % 2)
            b_tile = b_tiles.index(stage * HALVES + HALF).permute((1, 0))
            accs = _add_products(accs, a_tiles, stage * TILES, b_tile, TILES)
            release(bars.index(2 * stage + 1))
            step += 1
        first = (gl.program_id(0) * passes + i) * OCTETS_EACH
        for t in gl.static_range(TILES):
            both = accs[t].reshape((4, 2, 8, ROWS)).permute((0, 2, 3, 1)).split()
            _write(both[0], both[1], out, first + 4 * t, first + OCTETS_EACH, HALF * ROWS, rows, inner, ROWS, SILU)


@gluon.jit
def _zeros(TILES: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    sums = ()
    for _ in gl.static_range(TILES):
        sums = sums + (gl.zeros([64, ROWS], gl.float32, layout),)
    return sums


@gluon.jit
def _add_products(sums, a_tiles, first, b_tile, TILES: gl.constexpr):
    """The sums with the products of one turn: all are begun before the first is waited for."""
    begun = ()
    for t in gl.static_range(TILES):
        begun = begun + (warpgroup_mma(a_tiles.index(first + t), b_tile, sums[t], is_async=True),)
    done = ()
    for t in gl.static_range(TILES):
        done = done + (warpgroup_mma_wait(0, [begun[t]]),)
    return done


@gluon.jit
def _write(gate, up, out, octet, end, row, rows, inner, ROWS: gl.constexpr, SILU: gl.constexpr):
    kind: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gate.type.layout
    # Rounded where separate ops would round: after the product, and after the activation.
    active = activate(gate.to(kind).to(gl.float32), SILU).to(kind).to(gl.float32)
    result = (active * up.to(kind).to(gl.float32)).to(kind)  # [4, 8, ROWS]
    octets = octet + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    inside = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    m = row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = (octets[:, None] * 8 + inside[None, :])[:, :, None]
    mine = (octets < gl.minimum(end, inner // 8))[:, None, None] & (m < rows)[None, None, :]
    gl.store(out + m.to(gl.int64)[None, None, :] * inner + column, result, mask=mine)
