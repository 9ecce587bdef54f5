"""The products of a mixture of experts for many tokens: rows in the order of their experts, a matrix per expert."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.ops.device_facts import copies_tiles, multiprocessors, room
from tokenmill.ops.triton.config import pipeline
from tokenmill.ops.triton.launch import ceil_div, prefetch_constants, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.moe.route import ExpertGroups
from tokenmill.ops.triton.numeric import activate

EARLY_LINES = tl.constexpr(8)  # lines of the cache, of each row, that are sent for before there are tokens


@dataclass(frozen=True)
class ExpertTile:
    """How a matrix product is cut: rows of tokens x rows of weights x depth, and how the hardware runs it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 1  # tiles of tokens that go through all weights together, for the sake of the cache
    bulk: bool = False  # weights are fetched by the copy engine, tile by tile, instead of by the threads


def gate_up_rows(
    x: torch.Tensor,  # [tokens, hidden]
    groups: ExpertGroups,
    k: int,
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    kind: str,
    shape: ExpertTile,
) -> torch.Tensor:  # [choices, inner], in the order of the groups
    shape = _fitting(shape, 2, x)
    inner = gate_up.shape[1] // 2
    out = torch.empty(groups.order.shape[0], inner, dtype=x.dtype, device=x.device)
    bulk = shape.bulk and copies_tiles(x.device) and _may_be_bulk(gate_up)
    _gate_up_kernel[(groups.max_tiles * ceil_div(inner, shape.block_n),)](
        x, groups.order, groups.tiles, _tiled(gate_up, shape) if bulk else gate_up, out,
        x.stride(0), gate_up.stride(0), gate_up.stride(1), groups.max_tiles,
        gate_up.shape[0], multiprocessors(x.device),
        HIDDEN=x.shape[1], INNER=inner, PLACES=k, SILU=kind == "silu", BULK=bulk, **_launch(shape),
    )  # fmt: skip
    return out


def down_rows(
    active: torch.Tensor,  # [choices, inner], in the order of the groups
    groups: ExpertGroups,
    down: torch.Tensor,  # [experts, hidden, inner]
    shape: ExpertTile,
) -> torch.Tensor:  # [choices, hidden], in the order of the tokens
    assert shape.block_m == groups.block_m
    shape = _fitting(shape, 1, active)
    hidden, inner = down.shape[1:]
    out = torch.empty(active.shape[0], hidden, dtype=active.dtype, device=active.device)
    bulk = shape.bulk and copies_tiles(active.device) and _may_be_bulk(down)
    _down_kernel[(groups.max_tiles * ceil_div(hidden, shape.block_n),)](
        active, groups.order, groups.tiles, _tiled(down, shape) if bulk else down, out,
        down.stride(0), down.stride(1), groups.max_tiles, down.shape[0], multiprocessors(active.device),
        HIDDEN=hidden, INNER=inner, BULK=bulk, **_launch(shape),
    )  # fmt: skip
    return out


def _fitting(shape: ExpertTile, weights: int, x: torch.Tensor) -> ExpertTile:
    """Whose pipeline of tokens and of so many weights has room on the device of x."""
    column_bytes = (shape.block_m + weights * shape.block_n) * x.itemsize
    block_k, num_stages = pipeline(shape.num_stages, shape.block_k, column_bytes, room(x.device), x.device)
    return replace(shape, block_k=block_k, num_stages=num_stages)


def _may_be_bulk(weight: torch.Tensor) -> bool:
    """Whether the copy engine can find its way: all rows of all experts in one line, aligned to 16 bytes."""
    return weight.is_contiguous() and weight.shape[2] * weight.itemsize % 16 == 0 and weight.data_ptr() % 16 == 0


def _tiled(weight: torch.Tensor, shape: ExpertTile) -> Any:
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [shape.block_n, shape.block_k])


def _launch(shape: ExpertTile) -> dict[str, int]:
    return {
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
        "GROUP": shape.group,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }


@quick_launch
@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_kernel(
    x,  # [tokens, HIDDEN]
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    gate_up,  # [experts, 2 * INNER, HIDDEN], or all rows of it in tiles
    out,  # [choices, INNER]
    stride_token,
    stride_expert,
    stride_row,
    max_tiles,
    experts,
    early,  # programs that are there before there are tokens
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    SILU: tl.constexpr,
    BULK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr = False,
):
    _tile(
        x, order, tiles, gate_up, out, stride_token, stride_expert, stride_row, max_tiles, experts, early,
        HIDDEN, INNER, PLACES, True, SILU, BULK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PDL,
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["max_tiles"])
def _down_kernel(
    active,  # [choices, INNER]
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    down,  # [experts, HIDDEN, INNER], or all rows of it in tiles
    out,  # [choices, HIDDEN]
    stride_expert,
    stride_row,
    max_tiles,
    experts,
    early,  # programs that are there before there are tokens
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BULK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr = False,
):
    _tile(
        active, order, tiles, down, out, INNER, stride_expert, stride_row, max_tiles, experts, early,
        INNER, HIDDEN, 1, False, False, BULK, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PDL,
    )  # fmt: skip


@triton.jit
def _tile(
    rows, order, tiles, weights, out, stride_row_in, stride_expert, stride_row, max_tiles, experts, early,
    DEPTH: tl.constexpr,  # of the products
    COLUMNS: tl.constexpr,  # of the result
    PLACES: tl.constexpr,
    GATED: tl.constexpr,  # the weights are gate, then up, and rows are gathered; else rows are in order already
    SILU: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    tile, column = _place(tl.program_id(0), max_tiles, (COLUMNS + BLOCK_N - 1) // BLOCK_N, GROUP)
    if BLOCK_M < 64 and not BULK:
        first_row = weights + column * BLOCK_N * stride_row
        _prefetch(first_row, tile, early, experts, stride_expert, stride_row, BLOCK_N, DEPTH, PDL)
        if GATED:
            first_row += COLUMNS * stride_row
            _prefetch(first_row, tile, early, experts, stride_expert, stride_row, BLOCK_N, DEPTH, PDL)
    wait_for_previous(PDL)
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    if first < end:
        expert = tl.load(tiles + tile * 4)
        at = column * BLOCK_N
        # The last tile of an expert is often less than half full.
        if (BLOCK_M >= 128) & (end - first <= BLOCK_M // 2):
            _products(
                rows, order, weights, out, stride_row_in, stride_expert, stride_row, expert, first, end, at,
                DEPTH, COLUMNS, PLACES, GATED, SILU, BULK, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _products(
                rows, order, weights, out, stride_row_in, stride_expert, stride_row, expert, first, end, at,
                DEPTH, COLUMNS, PLACES, GATED, SILU, BULK, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _products(
    rows, order, weights, out, stride_row_in, stride_expert, stride_row, expert, first, end, at,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    BULK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, BLOCK_M)
    inside = row < end
    if GATED:
        source = tl.load(order + row, mask=inside, other=0) // PLACES
    else:
        source = tl.where(inside, row, first)
    depth = tl.arange(0, BLOCK_K)
    row_at = rows + source.to(tl.int64)[:, None] * stride_row_in + depth[None, :]
    ALL: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    result = _nothing(BLOCK_M, BLOCK_N)
    up = _nothing(BLOCK_M, BLOCK_N)
    for start in range(0, DEPTH, BLOCK_K):
        left = _part(row_at + start, depth + start, DEPTH, BLOCK_K)
        right = _weights(
            weights, expert, 0, at, start, stride_expert, stride_row, ALL, COLUMNS, DEPTH, BULK, BLOCK_N, BLOCK_K
        )
        result = _add_product(result, left, right, BLOCK_M)
        if GATED:
            right = _weights(
                weights, expert, COLUMNS, at, start, stride_expert, stride_row, ALL, COLUMNS, DEPTH, BULK, BLOCK_N,
                BLOCK_K,
            )  # fmt: skip
            up = _add_product(up, left, right, BLOCK_M)
    if GATED:
        result, to = activate(result, SILU) * up, row.to(tl.int64)
    else:
        to = tl.load(order + row, mask=inside, other=0).to(tl.int64)
    _store(out, result, to, at + tl.arange(0, BLOCK_N), COLUMNS, inside, BLOCK_M)


@triton.jit
def _place(program, max_tiles, across, GROUP: tl.constexpr):
    """Which tile of tokens and which block of weights: GROUP tiles take turns before the next block of weights."""
    group = program // (GROUP * across)
    size = tl.minimum(max_tiles - group * GROUP, GROUP)
    within = program - group * GROUP * across
    return group * GROUP + within % size, within // size


@triton.jit
def _prefetch(
    rows, tile, early, experts, stride_expert, stride_row, ROWS: tl.constexpr, LENGTH: tl.constexpr, PDL: tl.constexpr
):
    """Bring the beginning of the rows that this program probably reads into the cache, while others still route.

    Where experts have few tokens each, a tile is an expert, or one soon behind it: others read what this one does not.
    """
    if PDL:  # noqa: SIM102
        if (tl.program_id(0) < early) & (tile < experts):
            LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # elements of a line of the cache
            row = rows + tile.to(tl.int64) * stride_expert + tl.arange(0, ROWS)[:, None] * stride_row
            at = tl.arange(0, EARLY_LINES) * LINE
            prefetch_constants(row + tl.minimum(at, LENGTH - 1)[None, :], PDL)


@triton.jit
def _weights(
    weights, expert, base, at, start, stride_expert, stride_row,
    ROWS: tl.constexpr,  # of an expert
    COUNT: tl.constexpr,  # of those that begin at base
    LENGTH: tl.constexpr, BULK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_K] of an expert's weights. Rows past the edge hold what is not stored in the end."""
    if BULK:
        return weights.load([expert * ROWS + base + at, start])
    else:
        n = at + tl.arange(0, BLOCK_N)
        n = base + tl.where(n < COUNT, n, 0)
        depth = start + tl.arange(0, BLOCK_K)
        place = weights + expert.to(tl.int64) * stride_expert + n[:, None] * stride_row + depth[None, :]
        return _part(place, depth, LENGTH, BLOCK_K)


@triton.jit
def _part(at, depth, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    if LENGTH % BLOCK == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(depth < LENGTH)[None, :], other=0.0)


# The hardware multiplies 64 rows by any multiple of 8 columns. Where tokens are fewer, the weights are the rows.


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    if BLOCK_M < 64:
        return tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        return tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


@triton.jit
def _add_product(total, tokens, weights, BLOCK_M: tl.constexpr):
    if BLOCK_M < 64:
        return tl.dot(weights, tl.trans(tokens), total, input_precision="ieee")
    else:
        return tl.dot(tokens, tl.trans(weights), total, input_precision="ieee")


@triton.jit
def _store(out, total, row, n, WIDTH: tl.constexpr, inside, BLOCK_M: tl.constexpr):
    result = total.to(out.dtype.element_ty)
    if BLOCK_M < 64:
        result = tl.trans(result)
    tl.store(out + row[:, None] * WIDTH + n[None, :], result, mask=inside[:, None] & (n < WIDTH)[None, :])
