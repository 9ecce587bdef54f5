"""A mixture of experts in which a token's bits depend on itself alone: one way for any number of tokens, kept simple.

Products are those of gemm/invariant.py: the weight is the left operand of chains of warpgroup instructions that run
from the beginning of the inner dimension to its end. Tokens are only grouped, so that an expert is read once per tile.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.invariant import best_experts
from tokenmill.ops.triton.activation import act_mul
from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.gemm.invariant import invariant_gemm
from tokenmill.ops.triton.launch import quick_launch
from tokenmill.ops.triton.moe.experts import join
from tokenmill.ops.triton.moe.grouped import ExpertTile
from tokenmill.ops.triton.moe.route import ExpertGroups, group_by_expert


def choose_shape(choices_per_expert: float, dtype: torch.dtype) -> ExpertTile:
    if dtype == torch.float32:
        return ExpertTile(16, 64, 32, 4, 2)
    if choices_per_expert <= 8:
        return ExpertTile(16, 64, 128, 4, 4)
    if choices_per_expert <= 64:
        return ExpertTile(64, 64, 64, 4, 4)
    return ExpertTile(128, 128, 64, 8, 4)


def route(
    x: torch.Tensor,  # [tokens, hidden]
    router: torch.Tensor,  # [experts, hidden] float32
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k] float32, experts [tokens, top_k] int64
    return best_experts(invariant_gemm(x.to(router.dtype), router), top_k, normalize, scale)


def moe(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]: how much of each chosen expert
    experts: torch.Tensor,  # [tokens, k] integers: which experts
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
) -> torch.Tensor:  # [tokens, hidden]
    assert gate_up.stride(2) == down.stride(2) == x.stride(1) == 1
    shape = choose_shape(experts.numel() / gate_up.shape[0], x.dtype)
    groups = group_by_expert(experts.contiguous(), gate_up.shape[0], shape.block_m)
    active = act_mul(_products(x, groups, experts.shape[1], gate_up, shape), kind)
    parts = _products(active, groups, 1, down, shape)
    return join(parts, weights.contiguous(), enable_fp_fusion=False)


def _products(
    x: torch.Tensor,  # [choices / places, inner]
    groups: ExpertGroups,
    places: int,  # choices that read the same row
    weight: torch.Tensor,  # [experts, columns, inner]
    shape: ExpertTile,
) -> torch.Tensor:  # [choices, columns]
    columns, inner = weight.shape[1:]
    out = torch.empty(groups.order.shape[0], columns, dtype=x.dtype, device=x.device)
    _product_kernel[(groups.max_tiles, triton.cdiv(columns, shape.block_n))](
        x, groups.order, groups.tiles, weight, out, x.stride(0), weight.stride(0), weight.stride(1),
        INNER=inner, COLUMNS=columns, PLACES=places, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k, num_warps=shape.num_warps, num_stages=shape.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@quick_launch
@triton.jit
def _product_kernel(
    x,  # [choices / PLACES, INNER]
    order,  # [choices]
    tiles,  # [max_tiles, 4]: expert, first row, row after the last
    weight,  # [experts, COLUMNS, INNER]
    out,  # [choices, COLUMNS]
    stride_x,
    stride_expert,
    stride_row,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 4
    first = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if first < end:
        row = first + tl.arange(0, BLOCK_M)
        inside = row < end
        choice = tl.load(order + row, mask=inside, other=0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Rows past the edge of the weight read an existing one; what they give is not stored.
        weights = weight + tl.load(tile).to(tl.int64) * stride_expert
        weights += tl.minimum(column, COLUMNS - 1)[:, None] * stride_row + k[None, :]
        inputs = x + (choice // PLACES)[None, :] * stride_x + k[:, None]
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            w = tl.load(weights + start, mask=(k < INNER - start)[None, :], other=0.0)
            value = tl.load(inputs + start, mask=(k < INNER - start)[:, None], other=0.0)
            acc = tl.dot(w, value, acc, input_precision="ieee")
        kept = inside[:, None] & (column < COLUMNS)[None, :]
        tl.store(out + choice[:, None] * COLUMNS + column[None, :], tl.trans(acc).to(out.dtype.element_ty), mask=kept)


IMPLEMENTATIONS = (
    declare(route, optional=True, name="invariant", rank=20),
    declare(moe, name="invariant", rank=20),
)
