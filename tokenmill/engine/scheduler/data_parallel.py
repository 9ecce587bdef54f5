"""DataParallelScheduler: one scheduler for ranks with requests of their own, made of one for each group of them.

A group has rows, blocks and a prefix cache of its own, so everything that happens to a request once it has a place is
an ordinary `Scheduler`'s. Here requests are placed, and what the groups do next becomes one step for all.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

from tokenmill.engine.request import Finish, Request
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.lifecycle import Delta, SchedulerStats
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.engine.step import Loss, Step, StepResult
from tokenmill.errors import QueueFull
from tokenmill.kv.transfers import Transfers
from tokenmill.sampling.grammar import Constraint

PER_REQUEST = 32  # unread tokens that a request weighs which is there: it decodes for a while


class DataParallelScheduler:
    """Has what an engine asks of a scheduler. A request stays where it was placed: there its keys and values are."""

    def __init__(self, parts: Sequence[Scheduler], isolation: Isolation) -> None:
        """isolation: that all of them have. What breaks a step breaks that of all groups, so a suspect runs alone in
        all of them."""
        self.parts, self.isolation = list(parts), isolation
        self.limits = parts[0].limits  # of each group
        self.requests = ChainMap(*(part.requests for part in parts))
        self.transfers: Transfers | None = None
        self.modules = None  # groups place none
        self.finds_shared_prefixes = False
        self.drafting = self.tree = False  # nothing is drafted
        self.room_ahead = 0
        self._number = self._settled = self._failures = 0

    def add(self, request: Request) -> None:
        """Queue a request, with its followers, where it probably starts first."""
        full: QueueFull | None = None
        # Of equals the one with less in its cache.
        for part in sorted(self.parts, key=lambda part: (self._cost(part, request), len(part.kv.index))):
            try:
                part.add(request)
                return
            except QueueFull as error:
                full = full or error
        assert full is not None
        raise full

    def _cost(self, part: Scheduler, request: Request) -> float:
        """Tokens that are to be read there before it is through its prompt, its own that are not cached included;
        tokens for which blocks have to come free first count twice."""
        kv, life = part.kv, part.life
        if request.continues is not None and request.continues in life.held:
            return -1
        unread = part.waiting.num_tokens + sum(one.work() for one in part.running)
        there = len(part.running) + len(part.waiting) + len(life.parked)
        cached = 0 if request.reads_all else len(kv.match(request)) * kv.block_size
        missing = len(request.tokens) - cached
        no_room = max(0, missing - kv.pool.num_free * kv.block_size)
        return unread + missing + no_room + PER_REQUEST * there

    def cancel(self, id: str, now: float, why: Finish = Finish.CANCELLED) -> None:
        for part in self.parts:
            part.cancel(id, now, why)

    def grammar_moved(self, constraint: Constraint, now: float) -> None:
        for part in self.parts:
            part.grammar_moved(constraint, now)

    def schedule(self, now: float) -> Step | None:
        """The next step of every group that has one."""
        parts = [part.schedule(now) if self._may_run(part) else None for part in self.parts]
        if not any(part is not None for part in parts):
            return None
        self._number += 1
        return Step(self._number, parts=tuple(parts))

    def _may_run(self, part: Scheduler) -> bool:
        """A suspect is alone in its step: no other group has one then."""
        if not self.isolation.suspects:
            return True
        return self._settled == self._number and self.isolation.suspects[0].id in part.requests

    def commit(self, step: Step, result: StepResult, now: float) -> list[Delta]:
        self._settled = step.number
        deltas: list[Delta] = []
        for part, mine, found in zip(self.parts, step.parts, result.parts, strict=True):
            if mine is not None and found is not None:
                deltas += part.commit(mine, found, now)
        return deltas

    def fail(self, steps: Sequence[Step], cause: str, now: float, loss: Loss | None = None) -> list[Delta]:
        self._failures += 1
        self._settled = max(self._settled, *(step.number for step in steps))
        deltas: list[Delta] = []
        for index, part in enumerate(self.parts):
            void = [mine for step in steps if (mine := step.parts[index]) is not None]
            if void or loss is not None:
                deltas += part.fail(void, cause, now, loss)
        return deltas

    def drain_events(self) -> list[Delta]:
        return [delta for part in self.parts for delta in part.drain_events()]

    def take_in_transfers(self) -> None:
        """There are none."""

    def drop_held(self, id: str) -> None:
        for part in self.parts:
            part.drop_held(id)

    def reset_prefix_cache(self, salt: str | None = None) -> None:
        for part in self.parts:
            part.reset_prefix_cache(salt)

    def check_integrity(self) -> None:
        for part in self.parts:
            part.check_integrity()

    @property
    def running(self) -> list[Request]:
        return [request for part in self.parts for request in part.running]

    @property
    def waiting(self) -> list[Request]:
        return [request for part in self.parts for request in part.waiting]

    @property
    def read_prompts(self) -> bool:
        return any(part.read_prompts for part in self.parts)

    @property
    def has_work(self) -> bool:
        return any(part.has_work for part in self.parts)

    @property
    def has_free_row(self) -> bool:
        return any(part.has_free_row for part in self.parts)

    @property
    def stats(self) -> SchedulerStats:
        each = [part.stats for part in self.parts]
        return SchedulerStats(
            steps=self._number,
            tokens=sum(one.tokens for one in each),
            preemptions=sum(one.preemptions for one in each),
            failed_steps=self._failures,
            rejected=sum(one.rejected for one in each),
        )
