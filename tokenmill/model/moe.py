"""Which experts a token goes to, and how much of each: softmax routing, with or without expert groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.model.spec import MoESpec
from tokenmill.ops.registry import Ops


def experts_of(
    x: torch.Tensor,  # [tokens, hidden]
    router: torch.Tensor,  # [experts, hidden], float32 or wider
    moe: MoESpec,
    ops: Ops,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k], experts [tokens, top_k] integers
    """Routing in one op where the device has one for it, in torch elsewhere."""
    fused = ops.chosen.get("route")
    if fused is None or router.dtype != torch.float32 or (moe.groups > 1 and not fused.groups):
        return route(F.linear(x.to(router.dtype), router), moe)
    groups = (moe.groups, moe.top_groups) if moe.groups > 1 else ()
    weights, experts = fused.fn(x, router, moe.top_k, moe.normalize, moe.scale, *groups)
    return weights, experts


def route(
    scores: torch.Tensor,  # [tokens, experts]: router logits, float32 or wider
    moe: MoESpec,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [tokens, top_k], experts [tokens, top_k] int64
    probs = scores.softmax(-1)
    if moe.groups > 1:
        probs = _best_groups_only(probs, moe)
    weights, experts = probs.topk(moe.top_k, dim=-1)
    if moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * moe.scale, experts


def _best_groups_only(probs: torch.Tensor, moe: MoESpec) -> torch.Tensor:
    """Zero the experts outside each token's best groups; a group is as good as its best expert."""
    grouped = probs.view(probs.shape[0], moe.groups, -1)  # [tokens, groups, experts per group]
    best = grouped.amax(-1).topk(moe.top_groups, dim=-1).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[..., None], 0.0).flatten(-2)
