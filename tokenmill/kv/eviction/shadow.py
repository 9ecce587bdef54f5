"""ShadowLru: what LRU would have found with the same memory, and who decides."""

from __future__ import annotations

from tokenmill.kv.eviction.density import EPOCHS, HitDensity
from tokenmill.kv.eviction.policy import EvictionStats

WARM = 2  # times that the pool is filled before the learned policy may decide
SHARE = 0.001  # of all hits so far that may be lost before LRU takes over


class ShadowLru:
    """LRU with so many blocks holds what became free last: everything since a moment that moves on.

    The policy's books say how many blocks became free when and were not used since, evicted or not; that moment is
    where they add up to the pool. So a shadow costs no list of its own.
    """

    def __init__(self, num_blocks: int, stats: EvictionStats) -> None:
        self.leads = True
        self._num_blocks = num_blocks
        self._stats = stats
        self._since = 0  # epoch of the oldest that LRU has
        self._share = 1.0  # of that epoch's blocks
        self._behind = 0.0  # hits lost since the learned policy decides, gains forgotten
        self._until: float = WARM * num_blocks
        self._pause = float(WARM * num_blocks)
        self._seen = 0.0
        self._stored = 0

    def has(self, since: int) -> float:
        """How likely LRU has a block that became free in that epoch."""
        return 1.0 if since > self._since else (self._share if since == self._since else 0.0)

    def count(self, hits: int, shadow_hits: float) -> None:
        stats = self._stats
        stats.hits += hits
        stats.shadow_hits += shadow_hits
        if not self.leads:
            self._behind = max(0.0, self._behind + shadow_hits - hits)
            if self._behind > max(self._num_blocks / 16, SHARE * stats.shadow_hits):
                self.leads = True
                stats.takeovers += 1
                self._until = stats.evictions + self._pause
                self._pause *= 2

    def tick(self, density: HitDensity) -> None:
        held = 0
        for back in range(EPOCHS):
            here = max(0, density.totals[(density.epoch - back) % EPOCHS])
            if held + here > self._num_blocks:
                self._since, self._share = density.epoch - back, (self._num_blocks - held) / here
                break
            held += here
        else:
            self._since, self._share = density.epoch - EPOCHS, 1.0
        if self.leads and self._stats.evictions >= self._until:
            self.leads, self._behind = False, 0.0
