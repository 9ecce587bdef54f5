"""ServiceCounters: what a service counts, over all the engines it has had."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tokenmill.serve.engine import wire

COUNTERS = ("preemptions", "evicted_blocks", "cache_queried", "cache_hit", "failed_steps")


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """A service at this moment. The engine's own counters start anew when it is restarted; the totals here do not."""

    state: str  # starting, ready, restarting, draining, stopped
    engine: wire.EngineStats  # as last reported
    breaker: str  # closed, open, half_open
    generation: int
    restarts: int
    active: int  # requests accepted and not finished
    queued: int  # sequences that the engine has not let in yet
    queued_tokens: int  # their prompts
    drain_seconds: float | None  # predicted time to finish everything accepted; None: nothing measured yet
    accepted: int
    refused: int
    finished: dict[str, int]  # by reason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    evicted_blocks: int
    cache_queried: int
    cache_hit: int
    failed_steps: int


class ServiceCounters:
    def __init__(self) -> None:
        self.engine = wire.EngineStats()
        self.past: Counter[str] = Counter()  # counters of engines that are gone
        self.accepted = self.refused = 0
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0

    def close(self, reason: str, prompt: int, output: int, cached: int) -> None:
        self.finished[reason] += 1
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.cached_tokens += cached

    def stats(self, generation: int, **gauges: Any) -> ServiceStats:
        return ServiceStats(
            engine=self.engine,
            generation=generation,
            restarts=max(0, generation - 1),
            accepted=self.accepted,
            refused=self.refused,
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            **{name: self.past[name] + getattr(self.engine, name) for name in COUNTERS},
            **gauges,
        )

    def count_lost_engine(self) -> None:
        for name in COUNTERS:
            self.past[name] += getattr(self.engine, name)
        self.engine = wire.EngineStats()
