"""Seconds per token of replicas as a router counts with them: what is measured of equal machines is never equal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

EVEN = 1.5  # times the middle, or its part, that a replica may be off before it is taken to be another kind of machine


def evened(measured: Mapping[int, float | None]) -> dict[int, float]:
    """By replica. Whoever is near the middle of all counts as the middle: a conversation that left its cache for a
    server that seemed a tenth quicker would cost more than that brings. None, nothing measured yet, counts as the
    middle, too. Empty where nothing is known of anybody."""
    known = [seconds for seconds in measured.values() if seconds]
    if not known:
        return {}
    middle = statistics.geometric_mean(_middle(sorted(known)))
    return {
        number: seconds if seconds and not middle / EVEN <= seconds <= middle * EVEN else middle
        for number, seconds in measured.items()
    }


def _middle(ordered: list[float]) -> list[float]:
    """The one in the middle, or the two."""
    half = len(ordered) // 2
    return ordered[half : half + 1] if len(ordered) % 2 else ordered[half - 1 : half + 1]
