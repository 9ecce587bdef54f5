"""Drives a whole simulated engine through a day of clients and judges every answer, every block and every row."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from sim_answer import VOCAB, Answer, pooled_answer, solo_answer
from sim_clients import Client
from sim_groups import SimulatedGroups

from tokenmill.engine.core import Engine
from tokenmill.engine.request import REALTIME, Finish, Request, State
from tokenmill.engine.runner.simulated import Faults, SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Delta, Limits, Scheduler
from tokenmill.engine.scheduler.data_parallel import DataParallelScheduler
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.modules import ModuleRules
from tokenmill.engine.scheduler.policy import Policy
from tokenmill.engine.step import Pending, Step, parts_of
from tokenmill.errors import QueueFull, StepFailed
from tokenmill.kv.manager import KVManager
from tokenmill.kv.pruning import Pruning

HEAD_BOUND = 3  # steps that may serve a lower class while a realtime head waits for what that class holds
STEPS_PER_CLIENT = 200  # far above what any load needs: passing it means that something hangs


@dataclass(frozen=True)
class House:
    """The sizes and switches of one simulated engine."""

    rows: int = 32
    step_tokens: int = 128
    blocks: int = 200
    block_size: int = 8
    overlap: bool = True
    prefix_caching: bool = True
    eviction: str = "lru"
    watermark: float = 0.01
    max_queued_requests: int = 100_000
    policy: Policy | None = None
    stages: int = 1
    held_share: float = 0.5
    groups: int = 1  # of ranks with requests of their own, each with these sizes
    modules: ModuleRules | None = None
    pruning: Pruning | None = None

    def build(self, faults: Faults | None = None) -> Engine:
        clock = SimulatedClock()
        limits = Limits(
            self.rows,
            self.step_tokens,
            max_queued_requests=self.max_queued_requests,
            watermark=self.watermark,
            stages=self.stages,
            held_share=self.held_share,
        )
        stages, isolation = [1 / self.stages] * self.stages, Isolation()

        def group() -> tuple[Scheduler, SimulatedRunner]:
            kv = KVManager(self.blocks, self.block_size, self.prefix_caching, self.eviction, self.pruning)
            runner = SimulatedRunner(
                self.blocks, self.block_size, clock, vocab=VOCAB, faults=faults, stages=stages, pruning=self.pruning
            )
            return Scheduler(limits, kv, self.policy, isolation=isolation, modules=self.modules), runner

        if self.groups == 1:
            return Engine(*group(), overlap=self.overlap, clock=clock)
        schedulers, runners = zip(*(group() for _ in range(self.groups)), strict=True)
        scheduler = DataParallelScheduler(schedulers, isolation)
        return Engine(scheduler, SimulatedGroups(runners), overlap=self.overlap, clock=clock)


@dataclass
class Day:
    """One run of an engine: who asked, what was heard, what happened."""

    engine: Engine
    seed: int = 0
    drafts: float = 0.0  # share of running requests that are given a proposal after a step
    storm: float = 0.0  # probability per step that half of everybody cancels
    integrity: float = 0.01  # probability per step of a proof in mid-flight
    heard: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, Request] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    idle_checks: int = 0
    rejected: int = 0
    steps: int = 0
    worst_wait: int = 0  # steps that served a lower class while a realtime head waited
    _of: dict[str, Client] = field(default_factory=dict)
    _heads: dict[int, tuple[str, int]] = field(default_factory=dict)  # by number of the group

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clock: SimulatedClock = self.engine.clock  # type: ignore[assignment]
        self.runner: SimulatedRunner = self.engine.runner  # type: ignore[assignment]
        self.scheduler = self.engine.scheduler
        self._launch, self.runner.launch = self.runner.launch, self.launch  # type: ignore[method-assign]
        self._surprises: list[Exception] = []

    def launch(self, step: Step) -> Pending:
        """The engine survives whatever a runner raises; here only injected failures are welcome."""
        limits = self.scheduler.limits
        try:
            for part in parts_of(step):
                assert part.num_tokens <= limits.max_step_tokens and len(part.rows) <= limits.max_rows, "too large"
                assert len(set(part.rows)) == len(part.rows), "a row has two shares of a step"
            return self._launch(step)
        except StepFailed:
            raise
        except Exception as surprise:
            self._surprises.append(surprise)
            raise

    def run(self, crowd: Iterable[Client]) -> Day:
        """Every client comes when its time has come; returns when everybody has an end."""
        coming = sorted(crowd, key=lambda client: client.arrival)
        limit = STEPS_PER_CLIENT * len(coming) + 1000
        coming.reverse()
        while coming or self.engine.has_work:
            if not self.engine.has_work:
                self._check_idle()
                self.clock.wait_until(coming[-1].arrival)
            while coming and coming[-1].arrival <= self.clock.now and self._ask(coming[-1]):
                coming.pop()
            self.step()
            assert self.steps <= limit, f"{len(self.scheduler.requests)} requests are still there after {limit} steps"
        self._check_idle()
        self._judge()
        return self

    def step(self) -> list[Delta]:
        self.steps += 1
        deltas = self.engine.step()
        if self._surprises:
            raise self._surprises[0]
        assert not self.runner.violations, self.runner.violations
        for delta in deltas:
            self._hear(delta)
        self._watch_the_head()
        if self.drafts:
            self._propose()
        if self.storm and self.rng.random() < self.storm:
            for id in list(self._of):
                if self.rng.random() < 0.5:
                    self._cancel(self._of[id])
        if self.rng.random() < self.integrity:
            self.scheduler.check_integrity()
        return deltas

    def _ask(self, client: Client) -> bool:
        leader = client.requests[0]
        try:
            self.engine.add(leader)
        except QueueFull:  # a client that is turned away comes back
            self.rejected += 1
            return False
        for request in client.requests:
            self._of[request.id] = client
            self.heard[request.id] = []
            self.answers[request.id] = solo_answer(request, self.runner.faults.poisoned_tokens)
        if client.regrets:
            self._cancel(client)
        return True

    def _cancel(self, client: Client) -> None:
        for request in client.requests:
            if request.id not in client.ended:
                self.cancelled.add(request.id)
                self.engine.cancel(request.id)

    def _hear(self, delta: Delta) -> None:
        request = delta.request
        assert request.id in self.heard, f"{request} was never asked for"
        assert request.id not in self.ends, f"{request} spoke after its end"
        client = self._of[request.id]
        self.heard[request.id] += delta.tokens
        client.heard += len(delta.tokens)
        if delta.finished:
            self.ends[request.id] = request
            client.ended.add(request.id)
            del self._of[request.id]
        if client.vanish_after is not None and client.heard >= client.vanish_after:
            self._cancel(client)

    def _propose(self) -> None:
        """An oracle that is often right guesses what running requests will say."""
        for request in self.scheduler.running:
            if request.beams is None and not request.is_module and self.rng.random() < self.drafts:
                answer = self.answers[request.id]
                said = request.num_tokens - request.prompt_len
                guess = list(answer.tokens[said : said + request.unsure + self.rng.randrange(1, 6)])
                if answer.poisoned:
                    guess = guess[:-1]  # a proposal would carry the sequence past its poison
                elif self.rng.random() < 0.5:
                    guess.insert(self.rng.randrange(len(guess) + 1), VOCAB - 1)
                request.drafts = guess

    def _watch_the_head(self) -> None:
        """How many steps in a row a realtime newcomer waited for rows or blocks that lower classes hold."""
        for number, part in enumerate(self.scheduler.parts):
            head = part.waiting.head(self.clock.now, may_promote=False)
            if head is None or head[0] != REALTIME or not self._waits_for_lower(part, head[1]):
                self._heads[number] = ("", 0)
                continue
            known, waited = self._heads.get(number, ("", 0))
            self._heads[number] = head[1].id, waited + 1 if known == head[1].id else 1
            self.worst_wait = max(self.worst_wait, self._heads[number][1])

    def _waits_for_lower(self, part: Scheduler, request: Request) -> bool:
        running, limits, kv = part.running, part.limits, part.kv
        if request.metrics.first_scheduled is not None or part.isolation.suspects:
            return False
        peers = [one for one in running if one.lane <= REALTIME]  # promoted ones count as peers
        kept = {block for one in peers for block in one.blocks}
        watermark = int(limits.watermark * kv.pool.num_blocks)
        would_fit = kv.blocks_for(len(request.tokens)) + len(kept) + watermark <= kv.pool.num_blocks
        return would_fit and len(peers) < min(len(running), limits.max_rows)

    def _check_idle(self) -> None:
        self.idle_checks += 1
        self.scheduler.check_integrity()
        for part in self.scheduler.parts:
            pool = part.kv.pool
            assert not part.requests and not part.running and not len(part.waiting)
            assert pool.num_free == pool.num_blocks and pool.num_fenced == 0, "blocks leaked"
            assert len(part.life.free_rows) == part.limits.max_rows, "rows leaked"
            assert not part.isolation.suspects and not part.isolation.cases and not part.life.parked
            assert part.life.num_promoted == 0

    def _judge(self) -> None:
        unheard = self.heard.keys() - self.ends.keys()
        assert not unheard, f"{len(unheard)} requests never ended: {sorted(unheard)[:5]}"
        for id, request in self.ends.items():
            self._judge_one(request, self.answers[id], tuple(self.heard[id]))

    def _judge_one(self, request: Request, answer: Answer, heard: tuple[int, ...]) -> None:
        assert request.state is State.FINISHED and not request.in_flight and not request.pending, request
        if request.beams is None:
            assert heard == tuple(request.output), f"{request}: the stream and the request disagree"
            assert heard == answer.tokens[: len(heard)], f"{request}: said {heard}, alone it says {answer.tokens}"
        match request.finish:
            case Finish.STOP | Finish.LENGTH:
                assert request.finish == answer.finish, f"{request} ended with {request.finish}, not {answer.finish}"
                assert self.said(request) == answer.sequences, f"{request} said {self.said(request)}, not {answer}"
                assert request.pooled == pooled_answer(request), f"{request}: pooled {request.pooled}"
                if request.params.prompt_logprobs is not None and request.id.endswith("/0"):
                    logprobs = [one.token for one in request.prompt_logprobs]
                    scored = request.tokens[request.scored_from : request.prompt_len]
                    assert logprobs == scored, f"{request}: wrong prompt_logprobs"
            case Finish.CANCELLED:
                assert request.id in self.cancelled, f"{request} was cancelled by nobody"
            case Finish.DEADLINE:
                assert request.deadline is not None and request.metrics.finished > request.deadline, request
            case Finish.ERROR:
                assert answer.poisoned, f"{request} is innocent but ended with: {request.error}"
                assert re.search("holds a poisoned token|injected failure", request.error or ""), request.error
            case _:
                raise AssertionError(f"{request} ended with {request.finish}")

    def said(self, request: Request) -> tuple[tuple[int, ...], ...]:
        if request.beams is None:
            return (tuple(request.output),)
        return tuple(tuple(found.tokens) for found in request.beams.group.results())

    def transcript(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """What every request said, to compare days with each other."""
        return {id: self.said(request) for id, request in sorted(self.ends.items())}
