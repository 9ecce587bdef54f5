"""Percentiles, and how sure a figure is: intervals from repeats, or from drawing a run's own requests again."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

SHARES = (50, 90, 99)
RESAMPLES = 200
Interval = tuple[float, float]  # 95 %

# Student's t at 97.5 %, for 1, 2, ... degrees of freedom; beyond them Fisher's expansion is exact to four digits.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.959964

T = TypeVar("T")


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` percent of all are not above, interpolated; None where there are none."""
    return float(np.percentile(values, share)) if values else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"mean": statistics.fmean(values) if values else None}
    return found | {f"p{share}": percentile(values, share) for share in SHARES}


def over_repeats(values: Sequence[float]) -> Interval | None:
    """Where the mean of something positive lies, if repeats are near normal; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return max(0.0, mean - half), mean + half


def resampled(requests: Sequence[T], figure: Callable[[Sequence[T]], float | None], seed: int = 0) -> Interval | None:
    """Where a figure of one run lies: whole requests are drawn again, because tokens of one request are no strangers
    to one another. None where there is too little to draw from.
    """
    if len(requests) < 2:
        return None
    dice = random.Random(seed)
    drawn = (figure(dice.choices(requests, k=len(requests))) for _ in range(RESAMPLES))
    found = [value for value in drawn if value is not None]
    low, high = percentile(found, 2.5), percentile(found, 97.5)
    return None if low is None or high is None else (low, high)


def student(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _NORMAL
    second, third = 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + (z**3 + z) / (4 * freedom) + second / (96 * freedom**2) + third / (384 * freedom**3)
