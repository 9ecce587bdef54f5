"""Engine: the one loop. Schedule, launch, and commit the step before, so that the device never waits for the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tokenmill.engine.request import Finish, Request
from tokenmill.engine.scheduler import Delta, Scheduler
from tokenmill.engine.scheduler.step_seconds import StepSeconds
from tokenmill.engine.step import Pending, Runner, Step, facts_of
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.sampling.grammar import Constraint, Grammars

GRAMMAR_PATIENCE = 0.05  # seconds that a step with nothing else to do waits for a grammar or a mask
# The next step is launched so long before the one that runs ends: what the host takes for it, a share of the step for
# what cannot be foreseen, and more where the forecasts have been off.
LAUNCH_SECONDS = 0.003
LAUNCH_SHARE = 0.05
LAUNCH_ERRORS = 3.0
LEAST_PATIENCE = 0.002
PATIENCE_SLICE = 0.002  # seconds after which whoever is patient asks again
WAITED = 0.0001  # seconds from which on a wait is one for the device
INTEGRITY_INTERVAL = 10.0  # seconds between proofs that nothing leaks, made when the engine falls idle


class Engine:
    """Joins a scheduler and a runner. Not thread-safe: one thread calls it.

    With `overlap` a step is launched before the one before it is committed; without, the plain loop remains.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.grammars = grammars
        self.clock = clock
        self._depth = 1 if overlap else 0
        self._in_flight: deque[tuple[Step, Pending]] = deque()
        self._seconds = StepSeconds()
        self._began = 0.0  # when the device began with the oldest step in flight
        self._last_check = clock()
        self._stuck = 0

    def add(self, request: Request) -> None:
        """Accept a request; from here on it ends with tokens or with an error that names the cause."""
        constrained = [one for one in (request, *request.followers) if one.params.structured is not None]
        for one in constrained:
            if self.grammars is None:
                raise InvalidRequest("this engine gives no structured output; leave structured unset")
            one.grammar = Constraint(one.id, self.grammars)
        self.scheduler.add(request)
        for one in constrained:
            if one.grammar is not None and one.params.structured is not None:
                one.grammar.open(one.params.structured, one.output)

    def cancel(self, id: str, why: Finish = Finish.CANCELLED) -> None:
        """End a request now. Unknown and finished ids are ignored: cancelling races with finishing."""
        self.scheduler.cancel(id, self.clock(), why)

    def patience(self) -> float:
        """Seconds for which the next step need not be scheduled yet: the device is busy for longer than that.

        Whoever comes until then is in that step, and not in the one after it. With long steps, of many prompts, that is
        a whole step less to wait for a first token. To be asked again every few milliseconds (`PATIENCE_SLICE`): a step
        that is done sooner than foreseen ends it.
        """
        scheduler, seconds = self.scheduler, self._seconds
        if len(self._in_flight) < max(self._depth, 1) or not seconds.known or not scheduler.has_free_row:
            return 0.0
        if scheduler.waiting.num_tokens >= scheduler.pace.step_tokens:  # nobody who comes now would be in it
            return 0.0
        step, pending = self._in_flight[0]
        lasts = seconds.predict(facts_of(step))
        margin = LAUNCH_SECONDS + (LAUNCH_SHARE + LAUNCH_ERRORS * seconds.error) * lasts
        left = self._began + lasts - margin - self.clock()
        return float(left) if left > LEAST_PATIENCE and not pending.is_done() else 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[Delta]:
        """Launch the next step and commit the oldest launched one that should be. Returns what changed."""
        constrained = self.grammars is not None and self.grammars.busy
        if constrained:
            self._take_in_grammars()
        step = self.scheduler.schedule(self.clock())
        if constrained and step is None and not self._in_flight:
            self._take_in_grammars(GRAMMAR_PATIENCE)
        deltas: list[Delta] = []
        if step is not None:
            deltas += self._launch(step)
        if self._in_flight and (step is None or len(self._in_flight) > self._depth):
            deltas += self._commit_oldest()
        deltas += self.scheduler.drain_events()
        self._watch(progressed=step is not None or bool(deltas) or constrained)
        return deltas

    def reset_prefix_cache(self) -> None:
        self.scheduler.kv.reset_prefix_cache()

    def close(self) -> None:
        self._in_flight.clear()
        self.runner.close()
        if self.grammars is not None:
            self.grammars.close()

    def _take_in_grammars(self, patience: float | None = None) -> None:
        """Hear of masks and grammars; `patience` is for when there is nothing else to do."""
        assert self.grammars is not None
        moved = self.grammars.collect() if patience is None else self.grammars.collect(patience, for_grammars=True)
        for constraint in moved:
            self.scheduler.grammar_moved(constraint, self.clock())

    def _launch(self, step: Step) -> list[Delta]:
        try:
            pending = self.runner.launch(step)
            if not self._in_flight:
                self._began = self.clock()
            self._in_flight.append((step, pending))
            return []
        except Exception as error:  # a runner may fail in any way its device can: no request may be lost to it
            deltas: list[Delta] = []
            while self._in_flight:
                deltas += self._commit_oldest()
            self.runner.reset()
            return deltas + self.scheduler.fail([step], _cause(error), self.clock())

    def _commit_oldest(self) -> list[Delta]:
        step, pending = self._in_flight.popleft()
        asked = self.clock()
        try:
            result = pending.wait()
        except Exception as error:
            void = [step, *(later for later, _ in self._in_flight)]
            self._in_flight.clear()
            self.runner.reset()
            return self.scheduler.fail(void, _cause(error), self.clock())
        now = self.clock()
        if self._depth:
            facts, took = facts_of(step), now - self._began
            # Where nobody had to wait, it took no longer than that; and that is news if it was expected to.
            if now - asked > WAITED or self._seconds.predict(facts) > took:
                self._seconds.learn(facts, took)
        self._began = now
        return self.scheduler.commit(step, result, now)

    def _watch(self, progressed: bool) -> None:
        """Notice a scheduler that cannot go on, and prove the books when idle."""
        if progressed or not self.scheduler.has_work or self._in_flight:
            self._stuck = 0
        else:
            self._stuck += 1
            if self._stuck > 3:
                raise TokenmillError(
                    f"the scheduler has {len(self.scheduler.requests)} requests but nothing it can run: "
                    f"{list(self.scheduler.requests.values())[:4]}"
                )
        now = self.clock()
        if not self.has_work and now - self._last_check > INTEGRITY_INTERVAL:
            self._last_check = now
            self.scheduler.check_integrity()


def _cause(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
