"""EventBus: what a service publishes: steps, requests, the engine's stats, starts and deaths, as plain data."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise

from tokenmill.engine.request import Request
from tokenmill.serve.engine.wire import EngineStats, StepDone

log = logging.getLogger("tokenmill.serve")


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One turn of the engine's loop."""

    number: int
    at: float  # when the engine sent it, in the front's monotonic clock
    lag: float  # seconds from there to the front
    seconds: float
    decodes: int  # rows that computed one token
    prefill_rows: int
    prefill_tokens: int
    tokens: int  # new output tokens
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int

    @classmethod
    def of(cls, message: StepDone, now: float, lag: float, tokens: int) -> StepEvent:
        return cls(
            number=message.number,
            at=now - lag,
            lag=lag,
            seconds=message.seconds,
            decodes=message.decodes,
            prefill_rows=message.prefill_rows,
            prefill_tokens=message.prefill_tokens,
            tokens=tokens,
            running=message.running,
            waiting=message.waiting,
            waiting_tokens=message.waiting_tokens,
            free_blocks=message.free_blocks,
        )


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
            cached_tokens=metrics.cached_tokens,
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
    """Calls every listener with every event."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def emit(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:  # whoever watches must not disturb those who work
                log.exception("a listener failed")

    async def events(self, limit: int) -> AsyncIterator[Event]:
        arrived, kept = asyncio.Event(), deque[Event](maxlen=limit)

        def listen(event: Event) -> None:
            kept.append(event)
            arrived.set()

        leave = self.subscribe(listen)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                while kept:
                    yield kept.popleft()
        finally:
            leave()
