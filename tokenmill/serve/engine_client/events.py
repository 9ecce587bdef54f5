"""EventBus: what a service publishes: steps, requests, the engine's stats, starts and deaths, as plain data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from tokenmill.engine.request import Request
from tokenmill.serve.engine.wire import EngineStats

log = logging.getLogger("tokenmill.serve")


@dataclass(frozen=True, slots=True)
class StepEvent:
    number: int
    at: float  # when the engine sent it, in the front's monotonic clock
    lag: float  # seconds from there to the front
    seconds: float
    decodes: int  # rows that computed one token
    prefill_tokens: int
    tokens: int  # new output tokens


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request came in or ended. Times are seconds; None where it did not come so far."""

    id: str
    kind: str  # accepted, finished
    at: float
    prompt_tokens: int
    priority: int
    output_tokens: int = 0
    cached_tokens: int = 0
    reason: str | None = None  # stop, length, cancelled, deadline, error
    seconds: float = 0.0  # from its arrival
    queue_seconds: float | None = None
    ttft: float | None = None
    token_gaps: list[float] = field(default_factory=list)  # between the tokens of its first sequence
    restarts: int = 0  # engine restarts that it lived through

    @classmethod
    def finished(cls, id: str, leader: Request, now: float, reason: str, output: int, restarts: int) -> RequestEvent:
        metrics = leader.metrics
        return cls(
            id,
            "finished",
            now,
            leader.prompt_len,
            leader.priority,
            output_tokens=output,
            cached_tokens=metrics.reused_tokens,
            reason=reason,
            seconds=now - metrics.arrival,
            queue_seconds=metrics.queue_seconds,
            ttft=metrics.ttft,
            token_gaps=[after - before for before, after in pairwise(metrics.token_times)],
            restarts=restarts,
        )


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something happened to the engine process or to the circuit breaker."""

    kind: str  # ready, died, breaker_open, breaker_closed
    at: float
    text: str = ""
    generation: int = 0  # how often an engine was started


@dataclass(frozen=True, slots=True)
class StatsEvent:
    """The engine's stats, a few times per second while it works."""

    at: float
    stats: EngineStats


Event = StepEvent | RequestEvent | EngineEvent | StatsEvent


class EventBus:
    """Calls every listener with every event, on the event loop."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Returns what unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def emit(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:  # whoever watches must not disturb those who work
                log.exception("a listener failed")
