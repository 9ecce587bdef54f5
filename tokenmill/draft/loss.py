"""The loss of drafts: cross-entropy with the target's distribution, and the chance that a draft is what it samples."""

from __future__ import annotations

from typing import Any

import torch

PROBABILITY_BYTES = 256 << 20  # of float32 probabilities that exist at a time, times a few
MOST_FUSED = 16384  # tokens of a draft vocabulary for which a kernel does it in one pass
LEAST_PROBABILITY = 1e-9  # of a token that was sampled, as it is divided by


def parts(probabilities: torch.Tensor) -> list[slice]:  # [n, vocabulary]
    """Of the rows: few enough that float32 copies of them fit."""
    rows, vocabulary = probabilities.shape
    size = max(1, PROBABILITY_BYTES // (4 * vocabulary))
    return [slice(first, first + size) for first in range(0, rows, size)]


def draft_loss(
    x: torch.Tensor,  # [n, state]
    weight: torch.Tensor,  # [vocabulary, state]
    target: torch.Tensor,  # [n, vocabulary]: probabilities; what they lack to 1 is on tokens that cannot be drafted
    sampled: torch.Tensor,  # [n] int64: where the token that the target sampled is in the vocabulary; -1: nowhere
    warm: torch.Tensor,  # [n] bool: sampled with noise; otherwise it is the likeliest
    share: torch.Tensor,  # [n]
    soft_weight: float,
    match_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over rows of share * (soft * cross-entropy of q = softmax(x @ weight.T) with the target p, + match *
    -log m), and m [n]: the chance that the draft holds.

    Draft and target are the largest of log q + g and log p + g, with the same Gumbel noise g. If the target's is t,
    the draft is the same with chance m = 1 / sum over j of max(p_j, p_t q_j / q_t), over all noise that makes it t.
    Without noise, m is q_t.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _DraftLoss.apply(  # type: ignore[no-untyped-call]
        x, weight, target, sampled, warm, share, soft_weight, match_weight
    )
    return found


class _DraftLoss(torch.autograd.Function):
    """Computed with its gradient at once, part by part: logits of all rows and depths would not fit."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        sampled: torch.Tensor,
        warm: torch.Tensor,
        share: torch.Tensor,
        soft_weight: float,
        match_weight: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = weight.to(x.dtype)
        total = torch.zeros((), device=x.device)
        chances = torch.empty(len(x), device=x.device)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            for part in parts(target):
                logits = x[part] @ narrow.T
                rows = _fused_rows if logits.is_cuda and len(narrow) <= MOST_FUSED else _rows
                given = target[part], sampled[part], warm[part], share[part].float(), soft_weight, match_weight
                losses, chances[part], grad = rows(logits, *given)
                total += losses.sum()
                grad_x[part] = grad @ narrow
                grad_weight += grad.T @ x[part]
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(chances)
        return total, chances

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grads[0].to(grad_x.dtype), grad_weight * grads[0], None, None, None, None, None, None


def _rows(
    logits: torch.Tensor,  # [n, vocabulary]
    target: torch.Tensor,
    sampled: torch.Tensor,
    warm: torch.Tensor,
    share: torch.Tensor,
    soft_weight: float,
    match_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses times shares [n], chances that drafts hold [n], and the gradient [n, vocabulary] as wide as logits."""
    p, z = target.float(), logits.float()
    known, hot = (sampled >= 0)[:, None], warm[:, None]
    at = sampled.clamp_min(0)[:, None]
    mass = p.sum(-1, keepdim=True)
    log_z = z.logsumexp(-1, keepdim=True)
    soft = mass * log_z - (p * z).sum(-1, keepdim=True)
    q = (z - log_z).exp_()
    p_t, q_t = (one.gather(1, at).clamp_min(LEAST_PROBABILITY) for one in (p, q))
    grad = soft_weight * (mass * q - p)
    # 1 / m is a sum of what the draft's rivals reach, or what the target's do where that is more.
    scaled = q * (torch.where(hot, p_t, 1.0) / q_t)
    others = p * hot
    rest = torch.where(hot, (1 - mass).clamp_min(0), 0.0)
    inverse = torch.maximum(scaled, others).sum(-1, keepdim=True) + rest
    rivals = (scaled * (scaled > others)).div_(inverse).mul_(match_weight * known)
    rivals.scatter_(1, at, 0.0)
    grad += rivals
    grad.scatter_add_(1, at, -rivals.sum(-1, keepdim=True))
    losses = share[:, None] * (soft_weight * soft + match_weight * known * inverse.log())
    return losses[:, 0], (known / inverse)[:, 0], grad.mul_(share[:, None]).to(logits.dtype)


def _fused_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    sampled: torch.Tensor,
    warm: torch.Tensor,
    share: torch.Tensor,
    soft_weight: float,
    match_weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by a kernel that reads and writes everything once; it leaves the gradient where the logits were."""
    from tokenmill.ops.triton.draft_loss import draft_loss_rows  # Triton is not everywhere

    weights = soft_weight, match_weight, LEAST_PROBABILITY
    losses, chances = draft_loss_rows(logits, target, sampled, warm, share, *weights)
    return losses, chances, logits
