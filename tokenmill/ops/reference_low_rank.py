"""add_low_rank in plain torch: what each token's adapter adds to a product; slot by slot."""

from __future__ import annotations

import torch

from tokenmill.ops.registry import Implementation

NO_ADAPTER = -1


def add_low_rank(
    out: torch.Tensor,  # [tokens, out]: the product, added to
    x: torch.Tensor,  # [tokens, in]: its input
    adapter: torch.Tensor,  # [tokens] int64: slots, or NO_ADAPTER
    down: torch.Tensor,  # [slots, sections * rank, in]
    up: torch.Tensor,  # [slots, rank, out], scaled
    ranks: torch.Tensor,  # [slots] int64: how many of `rank` are used; the others are zeros
    ends: tuple[int, ...],  # of the sections of `out`, each with its own rows of `down`
) -> torch.Tensor:  # out
    rank = up.shape[1]
    for slot in torch.unique(adapter).tolist():
        if slot == NO_ADAPTER or not (used := int(ranks[slot])):
            continue
        mine = (adapter == slot).nonzero()[:, 0]
        rows = x[mine]
        for section, (first, last) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
            narrow = rows @ down[slot, section * rank : section * rank + used].T.to(x.dtype)
            out[mine, first:last] += (narrow @ up[slot, :used, first:last].to(x.dtype)).to(out.dtype)
    return out


# Adapters are refused where batch invariance is asked for.
IMPLEMENTATIONS = (Implementation(op="add_low_rank", name="reference", fn=add_low_rank, optional=True),)
