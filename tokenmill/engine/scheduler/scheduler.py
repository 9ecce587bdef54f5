"""Scheduler: turns waiting and running requests into steps, and results into tokens. Pure in (state, now)."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.engine.request import Finish, Request, Wait
from tokenmill.engine.scheduler.batching import Batching
from tokenmill.engine.scheduler.building import StepBuilder
from tokenmill.engine.scheduler.commit import Commits
from tokenmill.engine.scheduler.control import Pace
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.lifecycle import Delta, Lifecycle, Limits, SchedulerStats
from tokenmill.engine.scheduler.policy import Policy, PriorityClasses, WaitingQueue
from tokenmill.engine.scheduler.shared import SharedPrefixFinder
from tokenmill.engine.step import Step, StepResult
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.grammar import Constraint


class Scheduler:
    """Joins who decides what: `Lifecycle` (where requests are), `StepBuilder` (what runs next), `Commits` (what came of
    it) and `Isolation` (who breaks steps).
    """

    def __init__(
        self,
        limits: Limits,
        kv: KVManager,
        policy: Policy | None = None,
        *,
        pace: Pace | None = None,
        batching: Batching | None = None,
        find_shared_prefixes: bool = False,
    ) -> None:
        if limits.max_step_tokens < limits.max_rows:
            raise ValueError(f"max_step_tokens {limits.max_step_tokens} is below max_rows {limits.max_rows}")
        self.limits, self.kv = limits, kv
        self.policy = policy or PriorityClasses()
        self.pace = pace or Pace(limits)
        self.batching = batching or Batching()
        self.isolation = Isolation()
        self.life = Lifecycle(limits, kv, self.policy, self._ended)
        self.finds_shared_prefixes = find_shared_prefixes
        finder = SharedPrefixFinder(kv.block_size) if find_shared_prefixes else None
        self._builder = StepBuilder(self.life, self.isolation, self.batching, self.pace, finder)
        self._commits = Commits(self.life, self.isolation, self.batching)

    def add(self, request: Request) -> None:
        """Queue a request, and with it the followers that will fork from its prompt."""
        self.life.add(request)

    def cancel(self, id: str, now: float, why: Finish = Finish.CANCELLED) -> None:
        """End a request at any moment. Tokens of launched steps are dropped."""
        request = self.life.requests.get(id)
        if request is not None:
            self.life.finish(request, why, now)

    def grammar_moved(self, constraint: Constraint, now: float) -> None:
        """A request's grammar was compiled, its next mask is there, or it came to its end, good or bad."""
        request = self.life.requests.get(constraint.id)
        if request is None or request.grammar is not constraint:  # it ended meanwhile; its id may be another's
            return
        self._commits.end_with_grammar(request, now)
        if request.id in self.life.parked and request.waits_for is Wait.GRAMMAR:
            self.life.queue(request)

    def schedule(self, now: float) -> Step | None:
        """The next step, or None when nothing can run before a launched step is committed."""
        self.life.expire(now)
        for request, why in self.batching.turn(self.life.running):
            self.life.finish(request, why, now)
        return self._builder.build(now)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Delta]:
        """Take in what a step produced. Steps are committed in the order they were launched."""
        deltas = self._commits.commit(step, result, now)
        self.pace.committed(step, deltas, now)
        return deltas

    def fail(self, steps: Iterable[Step], cause: str, now: float) -> list[Delta]:
        """These launched steps are void: their requests start over from the tokens they have."""
        return self._commits.fail(steps, cause, now)

    def drain_events(self) -> list[Delta]:
        """Requests that ended outside of a commit (cancelled, expired)."""
        return self.life.drain_events()

    def check_integrity(self) -> None:
        self.life.check_integrity()

    @property
    def running(self) -> list[Request]:
        return self.life.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.life.waiting

    @property
    def requests(self) -> dict[str, Request]:
        return self.life.requests

    @property
    def stats(self) -> SchedulerStats:
        return self.life.stats

    @property
    def has_work(self) -> bool:
        return self.life.has_work

    @property
    def has_free_row(self) -> bool:
        return self._builder.has_free_row

    def _ended(self, request: Request) -> None:
        self.isolation.forget(request)
        self.policy.learn(request)
