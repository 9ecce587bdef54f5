"""Judges all policies of eviction on one block trace and one size: what each found, beside the optimum."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.kv.eviction import EVICTION
from tokenmill.plan.replay.optimum import optimum
from tokenmill.plan.replay.replay import BlockTrace, replay


@dataclass(frozen=True)
class Judged:
    blocks: int
    share: dict[str, float]  # of the blocks of prompts that were found, by policy
    optimum: float

    def closed(self, name: str) -> float | None:
        """How much of the gap between LRU and the optimum; None: there is none."""
        gap = self.optimum - self.share["lru"]
        return (self.share[name] - self.share["lru"]) / gap if gap > 1e-4 else None

    def against_lru(self, name: str) -> float:
        """How much more it finds, in parts of what LRU finds."""
        return (self.share[name] - self.share["lru"]) / max(self.share["lru"], 1e-4)


def judge(trace: BlockTrace, blocks: int, names: tuple[str, ...] = EVICTION, half: bool = False) -> Judged:
    """`half`: what happens in the first half of the requests only teaches."""
    first = len(trace.prompts) // 2 if half else 0
    asked = sum(map(len, trace.prompts[first:]))
    best = optimum(trace.requests(), blocks - 1)  # a block is taken for the end of each request
    found = sum(min(hits, len(prompt)) for hits, prompt in zip(best[first:], trace.prompts[first:]))
    return Judged(blocks, {name: replay(trace, blocks, name).share(first) for name in names}, found / max(1, asked))
