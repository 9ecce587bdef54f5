"""Small statistics that the sampling tests share."""

import math

import torch


def chi_square_z(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean (Wilson and Hilferty)."""
    enough = expected >= 5
    observed = torch.cat([observed[enough].double(), observed[~enough].double().sum()[None]])
    expected = torch.cat([expected[enough].double(), expected[~enough].double().sum()[None]])
    used = expected > 0
    assert observed[~used].sum() == 0, "something impossible was drawn"
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    degrees = int(used.sum()) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
