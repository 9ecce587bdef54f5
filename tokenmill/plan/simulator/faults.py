"""When replicas die and come back, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """Every replica fails at random, on average once in `mean_seconds`, and is back, empty, after `repair_seconds`."""

    mean_seconds: float
    repair_seconds: float = 60.0
    seed: int = 0

    def schedule(self, replicas: int, horizon: float) -> Iterator[tuple[float, int]]:
        """(moment, number of the replica) up to the horizon. One that is down at its moment stays down: no effect."""
        for number in range(replicas):
            source = random.Random(self.seed * 1_000_003 + number)
            at = source.expovariate(1 / self.mean_seconds)
            while at < horizon:
                yield at, number
                at += self.repair_seconds + source.expovariate(1 / self.mean_seconds)
