"""The loss of drafts and its gradient in one pass over the logits: a program per row of what draft/loss.py defines."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import power_of_two


def draft_loss_rows(
    logits: torch.Tensor,  # [n, vocabulary], overwritten with the gradient, times the rows' shares
    target: torch.Tensor,  # [n, vocabulary]: probabilities
    sampled: torch.Tensor,  # [n] int64: -1: nowhere in the vocabulary
    warm: torch.Tensor,  # [n] bool
    share: torch.Tensor,  # [n] float32
    soft_weight: float,
    match_weight: float,
    least: float,  # probability of a token that was sampled
) -> tuple[torch.Tensor, torch.Tensor]:  # [n] float32: losses times shares, and chances that the drafts hold
    rows, vocabulary = logits.shape
    losses, chances = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in "lc")
    block = power_of_two(vocabulary)
    _draft_loss_kernel[(rows,)](
        logits, target.contiguous(), sampled, warm.to(torch.int32), share, losses, chances,
        soft_weight, match_weight, least,
        VOCAB=vocabulary, BLOCK=block, num_warps=16 if block > 4096 else 4,
    )  # fmt: skip
    return losses, chances


@triton.jit
def _draft_loss_kernel(
    logits, target, sampled, warm, share, losses, chances, soft_weight, match_weight, least,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < VOCAB
    z = tl.load(logits + row * VOCAB + at, mask=inside, other=-float("inf")).to(tl.float32)
    p = tl.load(target + row * VOCAB + at, mask=inside, other=0.0).to(tl.float32)
    place, scale = tl.load(sampled + row), tl.load(share + row)
    hot = tl.load(warm + row).to(tl.float32)
    known = tl.where(place >= 0, 1.0, 0.0)
    top = tl.max(z, 0)
    e = tl.exp(z - top)
    total = tl.sum(e, 0)
    mass = tl.sum(p, 0)
    soft = mass * (top + tl.log(total)) - tl.sum(tl.where(inside, p * z, 0.0), 0)
    q = e / total
    chosen = at == place
    p_t = tl.maximum(tl.sum(tl.where(chosen, p, 0.0), 0), least)
    q_t = tl.maximum(tl.sum(tl.where(chosen, q, 0.0), 0), least)
    scaled = q * ((hot * p_t + 1.0 - hot) / q_t)
    others = p * hot
    inverse = tl.sum(tl.maximum(scaled, others), 0) + hot * tl.maximum(1.0 - mass, 0.0)
    rivals = tl.where((scaled > others) & (at != place), scaled, 0.0) * (match_weight * known / inverse)
    grad = soft_weight * (mass * q - p) + rivals - tl.where(chosen, tl.sum(rivals, 0), 0.0)
    tl.store(logits + row * VOCAB + at, (grad * scale).to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + row, scale * (soft_weight * soft + match_weight * known * tl.log(inverse)))
    tl.store(chances + row, known / inverse)
