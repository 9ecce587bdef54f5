"""Feeds: what brings weights that are not all on the device, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenmill.offload.expert_slots import ExpertCounts


@dataclass(frozen=True)
class FeedStats:
    """Since the start."""

    nbytes: int = 0
    layers: int = 0  # that were brought, these bytes
    stalls: int = 0  # layers that were waited for
    stall_seconds: float = 0.0
    moving_seconds: float = 0.0  # in which something was on its way
    experts: ExpertCounts | None = None  # of a feed that brings experts, whose stalls are layers that waited for some

    @property
    def overlap_seconds(self) -> float:
        """Of these, how many nobody waited for."""
        return max(0.0, self.moving_seconds - self.stall_seconds)


class Feed(Protocol):
    bandwidth: float  # bytes per second at which weights were brought while loading; 0: not known
    place: str  # where they are

    def stats(self) -> FeedStats: ...

    def close(self) -> None: ...


class LayerFeed(Feed, Protocol):
    """Asked on the thread and stream that computes, before every layer of a pass, resident ones included."""

    def enter(self, layer: int) -> None:
        """The layers before this one are done with; what is computed next finds this one's weights in their buffer.
        While a step is recorded the same is recorded. StepFailed: they cannot be had.
        """
        ...
