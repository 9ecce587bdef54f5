"""The order in which parts of ranks are added: by pairs, so that every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_by_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((0 + 1) + (2 + 3)) + ..., each sum rounded to the tensors' type; the sum of one part is that part itself.

    What has no partner waits for the next round: (0 + 1) + 2.
    """
    left = list(parts)
    while len(left) > 1:
        left = [left[i] + left[i + 1] if i + 1 < len(left) else left[i] for i in range(0, len(left), 2)]
    return left[0]
