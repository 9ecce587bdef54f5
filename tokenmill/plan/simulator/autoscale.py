"""Autoscaling by queue: how many replicas there should be, from what is outstanding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.errors import ConfigError


@dataclass(frozen=True)
class Autoscale:
    """Keep the requests per replica near a target, between two bounds; shrink only after it was too many for long."""

    least: int
    most: int
    per_replica: float  # requests, running and waiting, that one replica should have
    interval: float = 5.0  # seconds between looks
    startup: float = 60.0  # seconds until a new replica takes work: machine, weights, kernels
    patience: int = 6  # looks in a row that must ask for fewer before one is let go

    def wanted(self, outstanding: int, present: int, calm: int) -> tuple[int, int]:
        """Replicas there should be, and for how many looks in a row fewer would have done."""
        need = min(max(math.ceil(outstanding / self.per_replica), self.least), self.most)
        if need >= present:
            return need, 0
        if calm + 1 < self.patience:
            return present, calm + 1
        return max(need, present - max(1, present // 10)), 0  # a tenth at a time: load comes back faster than machines


def autoscale_from(text: str, startup: float) -> Autoscale:
    """LEAST:MOST:PER as it is written for commands. Raises ConfigError."""
    try:
        least, most, per = text.split(":")
        found = Autoscale(int(least), int(most), float(per), startup=startup)
    except ValueError:
        raise ConfigError(f"--autoscale is {text!r}; it is written as LEAST:MOST:PER, such as 4:64:32") from None
    if not (1 <= found.least <= found.most and found.per_replica > 0):
        raise ConfigError(f"--autoscale is {text!r}; LEAST is 1 or more, MOST no fewer, and PER above 0")
    return found
