"""A mixture of experts: few tokens read their experts row by row, many are grouped into matrix products per expert."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.moe_route import Groups, group_by_expert
from tokenmill.ops.triton.numeric import tanh

# Up to this many tokens hardly share experts, and whole rows of weights are on their way at once without any loop.
FEW_TOKENS = 8


@dataclass(frozen=True)
class Shape:
    """How a matrix product is cut: rows of tokens x rows of weights x depth, and how the hardware runs it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 1  # tiles of tokens that go through all weights together, for the sake of the cache


@dataclass(frozen=True)
class FewShape:
    """Rows of weights that one program reads, and its warps."""

    rows: int
    num_warps: int


def shapes(choices_per_expert: float, dtype: torch.dtype) -> tuple[Shape, Shape]:
    """For gate_up (block_n rows of each half) and for down. Both cut tokens alike.

    Up to 32 tokens per tile the weights' traffic is all that counts: narrow tiles, deep pipelines.
    """
    if dtype == torch.float32:
        block_m = 16 if choices_per_expert <= 16 else 64
        return Shape(block_m, 32, 32, 4, 2), Shape(block_m, 64, 32, 4, 2)
    if choices_per_expert <= 8:
        return Shape(16, 64, 128, 4, 3), Shape(16, 128, 128, 4, 3)
    if choices_per_expert <= 24:
        return Shape(32, 64, 128, 4, 3), Shape(32, 128, 128, 4, 3)
    if choices_per_expert <= 64:
        return Shape(64, 64, 64, 4, 4, 4), Shape(64, 128, 64, 4, 4, 4)
    return Shape(128, 128, 64, 8, 4, 8), Shape(128, 256, 64, 8, 4, 8)


def few_shapes(dtype: torch.dtype) -> tuple[FewShape, FewShape]:
    """For gate_up and for down, which holds rows of all its experts at once."""
    return (FewShape(2, 4), FewShape(1, 4)) if dtype == torch.float32 else (FewShape(4, 4), FewShape(2, 4))


def moe(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]: how much of each chosen expert
    experts: torch.Tensor,  # [tokens, k] integers: which experts
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")
    assert gate_up.stride(2) == down.stride(2) == x.stride(1) == 1
    weights, experts = weights.contiguous(), experts.contiguous()
    if x.shape[0] <= FEW_TOKENS:
        return few(x, weights, experts, gate_up, down, kind, few_shapes(x.dtype))
    return grouped(x, weights, experts, gate_up, down, kind, shapes(experts.numel() / gate_up.shape[0], x.dtype))


def few(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    kind: str,
    launch: tuple[FewShape, FewShape],
) -> torch.Tensor:
    """Every choice reads its expert; choices of one expert run side by side, so the second read hits the cache."""
    (tokens, k), hidden, inner = experts.shape, x.shape[1], down.shape[2]
    first, second = launch
    active = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    depth = min(power_of_two(hidden), 2048)
    _few_gate_up_kernel[(tokens * k, triton.cdiv(inner, first.rows))](
        x, experts, gate_up, active, x.stride(0), gate_up.stride(0), gate_up.stride(1),
        HIDDEN=hidden, INNER=inner, PLACES=k, SILU=kind == "silu", ROWS=first.rows, DEPTH=depth,
        num_warps=first.num_warps,
    )  # fmt: skip
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    depth = min(power_of_two(inner), 1024)
    _few_down_kernel[(tokens, triton.cdiv(hidden, second.rows))](
        active, weights, experts, down, out, down.stride(0), down.stride(1),
        HIDDEN=hidden, INNER=inner, PLACES=k, ROWS=second.rows, DEPTH=depth, num_warps=second.num_warps,
    )  # fmt: skip
    return out


def grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    kind: str,
    launch: tuple[Shape, Shape],
) -> torch.Tensor:
    """Tokens in the order of their experts, so that each expert is one matrix product."""
    (tokens, k), hidden = experts.shape, x.shape[1]
    groups = group_by_expert(experts, gate_up.shape[0], launch[0].block_m)
    active = gate_up_rows(x, groups, k, gate_up, kind, launch[0])
    parts = down_rows(active, groups, down, launch[1])
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    block = min(power_of_two(hidden), 2048)
    _join_kernel[(tokens, triton.cdiv(hidden, block))](
        parts, weights, out, HIDDEN=hidden, PLACES=k, BLOCK=block, num_warps=max(1, block // 512)
    )
    return out


def gate_up_rows(
    x: torch.Tensor, groups: Groups, k: int, gate_up: torch.Tensor, kind: str, shape: Shape
) -> torch.Tensor:  # [choices, inner], in the order of the groups
    inner = gate_up.shape[1] // 2
    out = torch.empty(groups.order.shape[0], inner, dtype=x.dtype, device=x.device)
    across = triton.cdiv(inner, shape.block_n)
    _gate_up_kernel[(groups.max_tiles * across,)](
        x, groups.order, groups.tiles, gate_up, out, x.stride(0), gate_up.stride(0), gate_up.stride(1),
        groups.max_tiles,
        HIDDEN=x.shape[1], INNER=inner, PLACES=k, SILU=kind == "silu", **_launch(shape),
    )  # fmt: skip
    return out


def down_rows(
    active: torch.Tensor, groups: Groups, down: torch.Tensor, shape: Shape
) -> torch.Tensor:  # [choices, hidden], in the order of the tokens
    assert shape.block_m == groups.block_m
    hidden, inner = down.shape[1:]
    out = torch.empty(active.shape[0], hidden, dtype=active.dtype, device=active.device)
    across = triton.cdiv(hidden, shape.block_n)
    _down_kernel[(groups.max_tiles * across,)](
        active, groups.order, groups.tiles, down, out, down.stride(0), down.stride(1), groups.max_tiles,
        HIDDEN=hidden, INNER=inner, **_launch(shape),
    )  # fmt: skip
    return out


def _launch(shape: Shape) -> dict[str, int]:
    return {
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
        "GROUP": shape.group,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_kernel(
    x,  # [tokens, HIDDEN]
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    gate_up,  # [experts, 2 * INNER, HIDDEN]
    out,  # [choices, INNER]
    stride_token,
    stride_expert,
    stride_row,
    max_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column = _place(tl.program_id(0), max_tiles, (INNER + BLOCK_N - 1) // BLOCK_N, GROUP)
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    if first < end:
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        row = first + tl.arange(0, BLOCK_M)
        inside = row < end
        token = tl.load(order + row, mask=inside, other=0) // PLACES
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        # Rows past the edge of a matrix read an existing one; what they give is not stored.
        weight_row = tl.where(n < INNER, n, 0)
        x_at = x + token.to(tl.int64)[:, None] * stride_token + depth[None, :]
        gate_at = gate_up + expert * stride_expert + weight_row[:, None] * stride_row + depth[None, :]
        up_at = gate_at + INNER * stride_row
        gate = _nothing(BLOCK_M, BLOCK_N)
        up = _nothing(BLOCK_M, BLOCK_N)
        for start in range(0, HIDDEN, BLOCK_K):
            left = _part(x_at + start, depth + start, HIDDEN, BLOCK_K)
            gate = _add_product(gate, left, _part(gate_at + start, depth + start, HIDDEN, BLOCK_K), BLOCK_M)
            up = _add_product(up, left, _part(up_at + start, depth + start, HIDDEN, BLOCK_K), BLOCK_M)
        active = _activate(gate, SILU) * up
        _store(out, active, row.to(tl.int64), n, INNER, inside, BLOCK_M)


@triton.jit(do_not_specialize=["max_tiles"])
def _down_kernel(
    active,  # [choices, INNER]
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    down,  # [experts, HIDDEN, INNER]
    out,  # [choices, HIDDEN]
    stride_expert,
    stride_row,
    max_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column = _place(tl.program_id(0), max_tiles, (HIDDEN + BLOCK_N - 1) // BLOCK_N, GROUP)
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    if first < end:
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        row = first + tl.arange(0, BLOCK_M)
        inside = row < end
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        weight_row = tl.where(n < HIDDEN, n, 0)
        active_at = active + tl.where(inside, row, first).to(tl.int64)[:, None] * INNER + depth[None, :]
        down_at = down + expert * stride_expert + weight_row[:, None] * stride_row + depth[None, :]
        total = _nothing(BLOCK_M, BLOCK_N)
        for start in range(0, INNER, BLOCK_K):
            left = _part(active_at + start, depth + start, INNER, BLOCK_K)
            total = _add_product(total, left, _part(down_at + start, depth + start, INNER, BLOCK_K), BLOCK_M)
        choice = tl.load(order + row, mask=inside, other=0).to(tl.int64)
        _store(out, total, choice, n, HIDDEN, inside, BLOCK_M)


@triton.jit
def _place(program, max_tiles, across, GROUP: tl.constexpr):
    """Which tile of tokens and which block of weights: GROUP tiles take turns before the next block of weights."""
    group = program // (GROUP * across)
    size = tl.minimum(max_tiles - group * GROUP, GROUP)
    within = program - group * GROUP * across
    return group * GROUP + within % size, within // size


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


@triton.jit
def _activate(gate, SILU: tl.constexpr):
    if SILU:
        return gate / (1.0 + tl.exp(-gate))
    else:
        return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def _join_kernel(
    parts,  # [tokens, PLACES, HIDDEN]
    weights,  # [tokens, PLACES]
    out,  # [tokens, HIDDEN]
    HIDDEN: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PLACES):
        choice = token * PLACES + place
        part = tl.load(parts + choice * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
        total += part * tl.load(weights + choice).to(tl.float32)
    tl.store(out + token * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)


@triton.jit
def _few_gate_up_kernel(
    x,  # [tokens, HIDDEN]
    experts,  # [choices]
    gate_up,  # [experts, 2 * INNER, HIDDEN]
    out,  # [choices, INNER]
    stride_token,
    stride_expert,
    stride_row,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    choice = tl.program_id(0)
    expert = tl.load(experts + choice).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    gate_at = gate_up + expert * stride_expert + n[:, None] * stride_row + k[None, :]
    gate = tl.zeros([ROWS, DEPTH], tl.float32)
    up = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        inside = (n < INNER)[:, None] & (k + start < HIDDEN)[None, :]
        row = tl.load(x + (choice // PLACES) * stride_token + start + k, mask=k + start < HIDDEN, other=0.0)
        row = row.to(tl.float32)[None, :]
        gate += row * tl.load(gate_at + start, mask=inside, other=0.0).to(tl.float32)
        up += row * tl.load(gate_at + INNER * stride_row + start, mask=inside, other=0.0).to(tl.float32)
    active = _activate(tl.sum(gate, 1), SILU) * tl.sum(up, 1)
    tl.store(out + choice * INNER + n, active.to(out.dtype.element_ty), mask=n < INNER)


@triton.jit
def _few_down_kernel(
    active,  # [tokens, PLACES, INNER]
    weights,  # [tokens, PLACES]
    experts,  # [tokens, PLACES]
    down,  # [experts, HIDDEN, INNER]
    out,  # [tokens, HIDDEN]
    stride_expert,
    stride_row,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    for place in tl.static_range(PLACES):
        choice = token * PLACES + place
        expert = tl.load(experts + choice).to(tl.int64)
        share = tl.load(weights + choice).to(tl.float32)
        at = down + expert * stride_expert + n[:, None] * stride_row + k[None, :]
        for start in tl.static_range(0, INNER, DEPTH):
            inside = (n < HIDDEN)[:, None] & (k + start < INNER)[None, :]
            row = tl.load(active + choice * INNER + start + k, mask=k + start < INNER, other=0.0).to(tl.float32)
            total += (row * share)[None, :] * tl.load(at + start, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + n, tl.sum(total, 1).to(out.dtype.element_ty), mask=n < HIDDEN)


IMPLEMENTATIONS = (declare(moe, batch_invariant=False),)
