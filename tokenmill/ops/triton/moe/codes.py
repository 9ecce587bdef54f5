"""Grouped products of experts in four or eight bits: codes become floats in registers, or meet codes of the inputs."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.gemm.quantize import quantize_rows
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.moe.experts import join
from tokenmill.ops.triton.moe.route import ExpertGroups, group_by_expert
from tokenmill.ops.triton.numeric import activate
from tokenmill.ops.types import Storage

FEW_CHOICES = 16  # per expert: up to so many, tiles of 16 rows


@dataclass(frozen=True)
class CodeTile:
    """How a product is cut: rows of tokens x rows of codes x columns, and how the hardware runs it."""

    block_m: int
    block_n: int
    block_k: int  # at most a group's columns
    num_warps: int
    num_stages: int


def shapes(choices_per_expert: float, group: int) -> CodeTile:
    """Not measured on a GPU yet. A step of the loop has one scale per row of codes."""
    depth = max(32, min(group & -group, 128))  # the hardware multiplies 32 integers at a time
    if choices_per_expert <= FEW_CHOICES:
        return CodeTile(16, 64, depth, 4, 3)
    return CodeTile(64, 64, min(depth, 64), 4, 3)


def moe_codes(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]
    experts: torch.Tensor,  # [tokens, k] integers
    gate_up: Storage,  # of quant/schemes/expert_codes.py, each [experts, 2 * inner, ...]
    down: Storage,  # [experts, hidden, ...]
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    return _moe(x, weights, experts, gate_up, down, kind, rounds_inputs=False)


def moe_w8a8(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: Storage, down: Storage, kind: str
) -> torch.Tensor:
    """The same with inputs in int8: sums are integers, and exact."""
    return _moe(x, weights, experts, gate_up, down, kind, rounds_inputs=True)


def _moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Storage,
    down: Storage,
    kind: str,
    rounds_inputs: bool,
) -> torch.Tensor:
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")
    weights, experts = weights.contiguous(), experts.contiguous()
    count, hidden = gate_up["weight"].shape[0], x.shape[1]
    per_expert, inner = experts.numel() / count, gate_up["weight"].shape[1] // 2
    first = shapes(per_expert, hidden // gate_up["scale"].shape[2])
    second = shapes(per_expert, inner // down["scale"].shape[2])
    groups = group_by_expert(experts, count, first.block_m)
    active = torch.empty(experts.numel(), inner, dtype=x.dtype, device=x.device)
    _products(x, groups, experts.shape[1], gate_up, active, kind, first, rounds_inputs)
    done = torch.empty(experts.numel(), hidden, dtype=x.dtype, device=x.device)
    _products(active, groups, 0, down, done, kind, second, rounds_inputs)
    return join(done, weights)


def _products(
    x: torch.Tensor,  # [tokens, in], or [choices, in] in the order of the groups
    groups: ExpertGroups,
    k: int,  # choices of a token, whose rows are gathered and whose products gate; 0: neither
    codes: Storage,
    out: torch.Tensor,
    kind: str,
    shape: CodeTile,
    rounds_inputs: bool,
) -> None:
    rows, scales = quantize_rows(x, torch.int8) if rounds_inputs else (x, x)
    weight, scale = codes["weight"], codes["scale"]
    zeros = codes.get("zeros")
    columns = out.shape[1]
    _codes_kernel[(groups.max_tiles * ceil_div(columns, shape.block_n),)](
        rows, scales, groups.order, groups.tiles, weight, scale, weight if zeros is None else zeros, out,
        rows.stride(0), weight.stride(0), weight.stride(1), groups.max_tiles,
        DEPTH=x.shape[1], COLUMNS=columns, GROUPS=scale.shape[2], PLACES=max(k, 1), GATED=k > 0, SILU=kind == "silu",
        FOUR=weight.dtype == torch.uint8, ZEROS=zeros is not None, ROUNDED=rounds_inputs, BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["max_tiles"])
def _codes_kernel(
    x,  # [tokens, DEPTH], or [choices, DEPTH]
    x_scale,  # [tokens or choices], of codes
    order,  # [choices]
    tiles,  # [max_tiles, 4]
    weight,  # [experts, rows, DEPTH or DEPTH / 2]
    scale,  # [experts, rows, GROUPS]
    zeros,  # the same
    out,  # [choices, COLUMNS]
    stride_token,
    stride_expert,
    stride_row,
    max_tiles,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    GATED: tl.constexpr,  # rows of codes are gate, then up, and rows of inputs are gathered; else they are in order
    SILU: tl.constexpr,
    FOUR: tl.constexpr,
    ZEROS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    tile = tl.program_id(0) % max_tiles
    n = tl.program_id(0) // max_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(tiles + tile * 4 + 1)
    end = tl.load(tiles + tile * 4 + 2)
    if first < end:
        expert = tl.load(tiles + tile * 4).to(tl.int64)
        row = first + tl.arange(0, BLOCK_M)
        inside = row < end
        choice = tl.load(order + row, mask=inside, other=0)
        source = choice // PLACES if GATED else tl.where(inside, row, first)
        ALL: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
        at = tl.where(n < COLUMNS, n, 0)
        rows = x + source.to(tl.int64)[:, None] * stride_token
        weight += expert * stride_expert
        scale += expert * ALL * GROUPS
        zeros += expert * ALL * GROUPS if ZEROS else 0
        result = _sum(
            rows, weight, scale, zeros, at, stride_row, DEPTH, GROUPS, FOUR, ZEROS, ROUNDED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if ROUNDED:
            of_inputs = tl.load(x_scale + source)[:, None]
            result *= of_inputs
        if GATED:
            up = _sum(
                rows, weight, scale, zeros, at + COLUMNS, stride_row, DEPTH, GROUPS, FOUR, ZEROS, ROUNDED, BLOCK_M,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if ROUNDED:
                up *= of_inputs
            result = activate(result, SILU) * up
        to = row if GATED else choice
        place = out + to.to(tl.int64)[:, None] * COLUMNS + n[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def _sum(
    rows, weight, scale, zeros, n, stride_row,
    DEPTH: tl.constexpr, GROUPS: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of inputs times rows `n` of an expert's codes and their scales; products of groups are scaled one by one."""
    GROUP: tl.constexpr = DEPTH // GROUPS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    whole = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, DEPTH, BLOCK_K):
        if ROUNDED:  # a scale per row, for it is not known where else these integers would fit
            depth = start + tl.arange(0, BLOCK_K)
            left = tl.load(rows + depth[None, :], mask=(depth < DEPTH)[None, :], other=0)
            right = tl.load(weight + n[:, None] * stride_row + depth[None, :], mask=(depth < DEPTH)[None, :], other=0)
            whole = tl.dot(left, tl.trans(right), whole, out_dtype=tl.int32)
        else:
            part = _product(rows, weight, zeros, n, stride_row, start, DEPTH, GROUPS, FOUR, ZEROS, BLOCK_K)
            if GROUPS == 1:
                total += part
            else:
                total += part * tl.load(scale + n * GROUPS + start // GROUP)[None, :]
    if ROUNDED:
        total = whole.to(tl.float32)
    if GROUPS == 1:
        total *= tl.load(scale + n)[None, :]
    return total


@triton.jit
def _product(
    rows, weight, zeros, n, stride_row, start,
    DEPTH: tl.constexpr, GROUPS: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K columns of one group; small integers are exact in every type of floats."""
    if FOUR:
        byte = tl.arange(0, BLOCK_K // 2)
        column = start + byte // 16 * 32 + byte % 16  # of the low bits; the high ones are 16 columns on
        known = (column < DEPTH)[None, :]
        both = tl.load(weight + n[:, None] * stride_row + (start // 2 + byte)[None, :], mask=known, other=0)
        left = tl.load(rows + column[None, :], mask=known, other=0.0)
        right = tl.load(rows + column[None, :] + 16, mask=known, other=0.0)
        low, high = (both & 15).to(tl.int8) - 8, (both >> 4).to(tl.int8) - 8
        if ZEROS:
            zero = tl.load(zeros + n * GROUPS + start // (DEPTH // GROUPS))[:, None]
            low, high = low - zero, high - zero
        product = tl.dot(left, tl.trans(low.to(rows.dtype.element_ty)), input_precision="ieee")
        return tl.dot(right, tl.trans(high.to(rows.dtype.element_ty)), product, input_precision="ieee")
    else:
        depth = start + tl.arange(0, BLOCK_K)
        left = tl.load(rows + depth[None, :], mask=(depth < DEPTH)[None, :], other=0.0)
        right = tl.load(weight + n[:, None] * stride_row + depth[None, :], mask=(depth < DEPTH)[None, :], other=0.0)
        return tl.dot(left, tl.trans(right.to(rows.dtype.element_ty)), input_precision="ieee")


IMPLEMENTATIONS = tuple(declare(fn, batch_invariant=False, optional=True) for fn in (moe_codes, moe_w8a8))
