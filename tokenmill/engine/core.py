"""Engine: the one loop. Schedule, launch, and commit the step before, so that the device never waits for the host."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.engine.adapters import AdapterPool
from tokenmill.engine.request import Finish, Request
from tokenmill.engine.scheduler import Delta, Scheduler
from tokenmill.engine.scheduler.data_parallel import DataParallelScheduler
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.engine.step import Pending, Runner, Step, StepResult
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.offload.feed import Feed
from tokenmill.sampling.grammar import Constraint, Grammars

if TYPE_CHECKING:
    from tokenmill.engine.adapter_store import AdapterStore

log = logging.getLogger("tokenmill.engine")

GRAMMAR_PATIENCE = 0.05  # seconds that a step with nothing else to do waits for a grammar or a mask
TRANSFER_PATIENCE = 0.02  # and for blocks on their way
ADAPTER_PATIENCE = 0.02  # and for adapters that are read
INTEGRITY_INTERVAL = 10.0  # seconds between proofs that nothing leaks, made when the engine falls idle


class Engine:
    """Joins a scheduler and a runner. Not thread-safe: one thread calls it.

    With `overlap` a step is launched before the one before it is committed; without, the plain loop remains. A
    scheduler that deals requests into sets for the stages of a pipeline has as many steps in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataParallelScheduler,
        runner: Runner,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.grammars = grammars
        self.speculation = speculation
        self.adapters = adapters
        if grammars is not None:
            grammars.looks_ahead = speculation is not None
        self.feed: Feed | None = None  # what brings layers that do not fit, where there are such
        self.clock = clock
        self._depth = max(scheduler.limits.stages - 1, int(overlap))  # steps that stay in flight behind a commit
        self._in_flight: deque[tuple[Step, Pending, float]] = deque()  # and when it was launched
        self._last_commit = self._last_check = clock()
        self._stuck = 0

    def add(self, request: Request) -> None:
        """Accept a request; from here on it ends with tokens or with an error that names the cause."""
        for one in (request, *request.followers):
            if one.adapter:
                one.adapter_key = self._pool().key_of(one.adapter)
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

    def drop_held(self, id: str) -> None:
        """Nobody will continue what the request of this id left behind."""
        self.scheduler.drop_held(id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or bool(self.adapters and self.adapters.opening)

    def step(self) -> list[Delta]:
        """Launch the next step and commit the oldest launched one that should be. Returns what changed."""
        constrained = self.grammars is not None and self.grammars.busy
        if constrained:
            self._take_in_grammars()
        if self.speculation is not None:
            self._propose(self.speculation, constrained)
        now = self.clock()
        bringing = self.adapters is not None and self._take_in_adapters(self.adapters, now)
        transfers = self.scheduler.transfers
        copying = transfers is not None and transfers.under_way
        if copying:
            self.scheduler.take_in_transfers()
        step = self.scheduler.schedule(now)
        if constrained and step is None and not self._in_flight:
            self._take_in_grammars(GRAMMAR_PATIENCE)
        elif transfers is not None and transfers.under_way and step is None and not self._in_flight:
            transfers.wait(TRANSFER_PATIENCE)
        elif bringing and step is None and not self._in_flight and self.adapters is not None:
            self.adapters.wait(ADAPTER_PATIENCE)
        deltas: list[Delta] = []
        if step is not None:
            self._stuck = 0
            try:
                self._in_flight.append((step, self.runner.launch(step), now))
                if self.speculation is not None:
                    self.speculation.launched(step)
            except Exception as error:  # a runner may fail in any way its device can: no request may be lost to it
                self._in_flight.append((step, _NotLaunched(error), now))
                while self._in_flight:  # those before it may be as they should
                    deltas += self._commit_oldest()
        if self._in_flight and (step is None or len(self._in_flight) > self._depth):
            deltas += self._commit_oldest()
        deltas += self.scheduler.drain_events()
        if self.speculation is not None:
            for delta in deltas:
                if delta.finished:
                    self.speculation.ended(delta.request)
        if self.scheduler.modules is not None and self.scheduler.modules.used:
            deltas = [delta for delta in deltas if not delta.request.is_module]
        if step is None or not self.scheduler.requests:
            self._watch(progressed=bool(deltas) or constrained or copying or bringing)
        return deltas

    def load_adapter(self, name: str, path: Path) -> str:
        """Read a LoRA adapter, which requests may name from then on; returns what its files are known by. Who runs
        under this name already goes on with the weights that it began with. Raises InvalidRequest."""
        pool = self._pool()
        assert self.adapters is not None
        key = self.adapters.open(path)
        pool.register(name, key)
        return key

    def load_adapter_later(self, name: str, path: Path, then: Callable[[str | None, str | None], None]) -> None:
        """The same beside the steps, which go on; then(key, why not) is called in one of them."""
        pool = self._pool()
        assert self.adapters is not None

        def register(key: str | None, error: str | None) -> None:
            if key is not None:
                pool.register(name, key)
            then(key, error)

        self.adapters.open_later(path, register)

    def unload_adapter(self, name: str) -> None:
        """Nobody may name it any more; who runs with it is not touched. Raises InvalidRequest."""
        self._pool().unregister(name)

    def _pool(self) -> AdapterPool:
        pool = self.scheduler.parts[0].life.adapters
        if pool is None:
            raise InvalidRequest("this engine serves no adapters; set enable_lora=True")
        return pool

    def _take_in_adapters(self, store: AdapterStore, now: float) -> bool:
        """Give slots to requests that wait for one. Whether anything is read, or has just been."""
        busy, pool = store.busy, self._pool()
        if busy or pool.has_waiting:
            self.scheduler.parts[0].life.take_in_adapters(now)
        return busy or store.busy

    def reset_prefix_cache(self, cache_salt: str | None = None) -> None:
        """Forget what can be found of all texts, or of those with this cache salt; who runs is not touched."""
        self.scheduler.reset_prefix_cache(cache_salt)
        if self.speculation is not None:
            self.speculation.forget(cache_salt)

    def close(self) -> None:
        self._in_flight.clear()
        if self.scheduler.transfers is not None:
            self.scheduler.transfers.close()
        self.runner.close()
        if self.feed is not None:
            self.feed.close()
        if self.grammars is not None:
            self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()

    def _propose(self, speculation: Speculation, constrained: bool) -> None:
        """Drafts for whoever decodes; beams are chosen by the host. One that fails costs its drafts, no answer."""
        scheduler = self.scheduler
        if self.grammars is not None:  # masks behind forced tokens are computed for drafts alone
            self.grammars.looks_ahead = len(scheduler.running) <= speculation.most_rows
        if speculation.rests(len(scheduler.running), constrained):
            scheduler.drafting = False
            return
        if scheduler.read_prompts and len(scheduler.waiting) and scheduler.has_free_row:
            return  # more prompts are about to be read, and beside these no drafts are verified
        decoding = [
            one
            for one in scheduler.running
            if one.num_tokens > one.prompt_len
            and one.beams is None
            and not one.is_module
            and (one.grammar is None or (one.grammar.ready and one.waits_for is None))
        ]
        reading = len(decoding) < len(scheduler.running)
        if reading and any(one.num_tokens <= one.prompt_len for one in scheduler.running):
            return
        try:
            speculation.propose(decoding)
            scheduler.drafting, scheduler.tree = speculation.drafting, speculation.tree
            scheduler.room_ahead = speculation.room_ahead
        except Exception as error:
            self.speculation, self.scheduler.drafting = None, False
            if self.grammars is not None:
                self.grammars.looks_ahead = False
            for request in decoding:
                request.drafts = []
            log.warning("nothing is proposed any more, because the proposer failed: %s", _cause(error))

    def _take_in_grammars(self, patience: float | None = None) -> None:
        """Hear of masks and grammars; `patience` is for when there is nothing else to do."""
        assert self.grammars is not None
        moved = self.grammars.collect() if patience is None else self.grammars.collect(patience, for_grammars=True)
        for constraint in moved:
            self.scheduler.grammar_moved(constraint, self.clock())

    def _commit_oldest(self) -> list[Delta]:
        step, pending, launched = self._in_flight.popleft()
        try:
            result = pending.wait()
        except Exception as error:
            void = [step, *(later for later, _, _ in self._in_flight)]
            self._in_flight.clear()
            loss = self.runner.reset()
            if self.speculation is not None:
                self.speculation.reset()
            return self.scheduler.fail(void, _cause(error), self.clock(), loss)
        now = self.clock()
        if self.speculation is not None:
            self.speculation.committed(step, result, now - max(launched, self._last_commit))
        if self.scheduler.transfers is not None:
            self.scheduler.transfers.learn(step, now - max(launched, self._last_commit))
        self._last_commit = now
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


class _NotLaunched:
    """Stands for what a step would have been."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


def _cause(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
