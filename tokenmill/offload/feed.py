"""Feed: what brings the layers of a StreamedWeights into their buffers, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class FeedStats:
    """Since the start."""

    nbytes: int = 0
    layers: int = 0  # that were brought, these bytes
    stalls: int = 0  # layers that were waited for
    stall_seconds: float = 0.0
    moving_seconds: float = 0.0  # in which something was on its way

    @property
    def overlap_seconds(self) -> float:
        """Of these, how many nobody waited for."""
        return max(0.0, self.moving_seconds - self.stall_seconds)


class Feed(Protocol):
    """Asked on the thread and stream that computes, before every layer of a pass, resident ones included."""

    bandwidth: float  # bytes per second at which layers were brought while loading; 0: not known
    place: str  # where the layers are

    def enter(self, layer: int) -> None:
        """The layers before this one are done with; what is computed next finds this one's weights in their buffer.
        While a step is recorded the same is recorded. StepFailed: they cannot be had.
        """
        ...

    def stats(self) -> FeedStats: ...

    def close(self) -> None: ...
