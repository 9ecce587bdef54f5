"""AWQ: channels with large inputs are made larger before rounding, as far as it lowers the error of the product."""

from __future__ import annotations

import torch

from tokenmill.quant.forms import WeightForm
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.tool.calibrate import Moments
from tokenmill.quant.tool.joints import Joint

STEPS = 20  # exponents of the inputs' magnitude that are tried, from 0 to 1
ROWS = 512  # rows that are tried, spread over the matrix: the scales are common to all


def best_scale(weight: torch.Tensor, moments: Moments, form: WeightForm, joint: Joint) -> torch.Tensor:  # [columns]
    magnitude = joint.shared(moments.mean).clamp(min=1e-8)
    weight = weight[:: max(1, weight.shape[0] // ROWS)]
    best = torch.ones_like(magnitude)
    least = product_error(weight, best, moments.gram, form)
    for step in range(1, STEPS + 1):
        scale = magnitude ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()  # centred: neither side gets out of its dtype's range
        error = product_error(weight, scale, moments.gram, form)
        if error < least:
            best, least = scale, error
    return best


def product_error(weight: torch.Tensor, scale: torch.Tensor, gram: torch.Tensor, form: WeightForm) -> float:
    """Sum of squares of what the products with all inputs change when the scaled matrix is rounded."""
    rounded = round_to_nearest(weight * scale, form).widen(torch.float32) / scale
    missing = rounded - weight
    return float(((missing @ gram) * missing).sum())
