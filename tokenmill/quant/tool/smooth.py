"""SmoothQuant: outliers move from the inputs into the weights, so that both can be rounded to 8 bits."""

from __future__ import annotations

import torch

ALPHA = 0.5  # how much of the difficulty the weights take over


def smoothing_scale(weight: torch.Tensor, largest: torch.Tensor, alpha: float) -> torch.Tensor:  # [columns]
    """largest^alpha / weight^(1 - alpha), by channel: what divides the inputs and multiplies the weights."""
    inputs, weights = largest.clamp(min=1e-5), weight.abs().amax(0).clamp(min=1e-5)
    return (inputs**alpha / weights ** (1 - alpha)).clamp(min=1e-5)
