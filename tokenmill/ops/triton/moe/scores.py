"""Scores of the experts of a mixture for many tokens: a product to the precision of float32, on the tensor cores."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tokenmill.ops.triton.config import power_of_two
from tokenmill.ops.triton.launch import ceil_div, prefetch_constants, quick_launch, start_next, wait_for_previous


def router_scores(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:  # [parts, tokens, experts] float32
    """x @ router.T to the precision of float32, without a copy of x in float32; the sum of the parts."""
    return split_scores(x, router) if x.dtype == torch.bfloat16 else F.linear(x.float(), router)[None]


@dataclass(frozen=True)
class ScoresShape:
    """Tokens x experts x depth of a tile, into how many parts the hidden dimension is cut, and the pipeline."""

    block_m: int
    block_n: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int


def scores_shape(tokens: int) -> ScoresShape:
    """Few tiles of tokens cannot fill the device, so the hidden dimension is cut, too."""
    if tokens <= 128:
        return ScoresShape(16, 32, 128, 8, 4, 2)
    if tokens <= 256:
        return ScoresShape(16, 64, 128, 8, 4, 2)
    if tokens <= 4096:
        return ScoresShape(64, 128, 64, 8 if tokens <= 1024 else 4 if tokens <= 2048 else 2, 4, 3)
    return ScoresShape(128, 128, 64, 2, 8, 3)


def split_scores(x: torch.Tensor, router: torch.Tensor, shape: ScoresShape | None = None) -> torch.Tensor:
    (tokens, hidden), experts = x.shape, router.shape[0]
    shape = shape or scores_shape(tokens)
    turns = ceil_div(ceil_div(hidden, shape.block_k), shape.parts)
    parts = ceil_div(hidden, turns * shape.block_k)
    scores = torch.empty(parts, tokens, experts, dtype=torch.float32, device=x.device)
    block_n = max(16, min(shape.block_n, power_of_two(experts)))
    _split_scores_kernel[(ceil_div(tokens, shape.block_m), ceil_div(experts, block_n), parts)](
        x, router, scores, tokens, x.stride(0), router.stride(0),
        HIDDEN=hidden, EXPERTS=experts, TURNS=turns, EARLY=min(512, power_of_two(turns * shape.block_k)),
        BLOCK_M=shape.block_m, BLOCK_N=block_n, BLOCK_K=shape.block_k, num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip
    return scores


@quick_launch
@triton.jit(do_not_specialize=["tokens"])
def _split_scores_kernel(
    x,  # [tokens, HIDDEN]
    router,  # [EXPERTS, HIDDEN]
    scores,  # [parts, tokens, EXPERTS]
    tokens,
    stride_token,
    stride_expert,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TURNS: tl.constexpr,
    EARLY: tl.constexpr,  # of the part's depth, what is sent for before there are tokens
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """A float32 is the sum of three bfloat16, whose products with a bfloat16 are exact in float32."""
    start_next(PDL)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part_of_hidden = tl.program_id(2)
    first = part_of_hidden * TURNS * BLOCK_K
    router_row = router + tl.where(expert < EXPERTS, expert, 0)[:, None] * stride_expert
    line = first + tl.arange(0, EARLY // 32) * 32  # a line of the cache has 32 floats
    prefetch_constants(router_row + tl.minimum(line, HIDDEN - 1)[None, :], PDL)
    wait_for_previous(PDL)
    k = first + tl.arange(0, BLOCK_K)
    x_at = x + tl.where(token < tokens, token, 0).to(tl.int64)[:, None] * stride_token + k[None, :]
    router_at = router_row + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(0, TURNS):
        inside = (k + turn * BLOCK_K < HIDDEN)[None, :]
        row = tl.trans(tl.load(x_at + turn * BLOCK_K, mask=inside, other=0.0))
        rest = tl.load(router_at + turn * BLOCK_K, mask=inside, other=0.0)
        for _ in tl.static_range(3):
            part = rest.to(x.dtype.element_ty)
            rest -= part.to(tl.float32)
            total = tl.dot(part, row, total)
    kept = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
    score_row = part_of_hidden.to(tl.int64) * tokens + token
    tl.store(scores + score_row[:, None] * EXPERTS + expert[None, :], tl.trans(total), mask=kept)
