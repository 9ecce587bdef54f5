"""Lifecycle: the places that a request can be in, and every move between them.

WAITING in the queue, PARKED (`waits_for` says for what), RUNNING with a row and blocks, or FINISHED. Nothing else puts
a request into another place.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill.engine.adapters import AdapterPool
from tokenmill.engine.beams import Beams, Turn
from tokenmill.engine.held import HeldSequences
from tokenmill.engine.request import Finish, Request, State, Wait
from tokenmill.engine.scheduler.isolation import Isolation
from tokenmill.engine.scheduler.policy import Policy, WaitingQueue
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.records import TokenLogprobs

if TYPE_CHECKING:
    from tokenmill.engine.scheduler.modules import Modules

WAITING, PARKED, RUNNING, FINISHED = State.WAITING, State.PARKED, State.RUNNING, State.FINISHED  # quick to look up


@dataclass(frozen=True)
class Limits:
    """What one step and the queue may hold."""

    max_rows: int
    max_step_tokens: int  # at least max_rows, so that every running request can decode in every step
    max_verified: int = 0  # tokens of a step that only decodes, drafts included; never fewer than max_rows
    max_queued_requests: int = 100_000
    max_queued_tokens: int = 50_000_000
    watermark: float = 0.01  # share of blocks kept free at admission, so that running requests can grow
    float32_retry: bool = False  # the runner can compute rows in float32, whatever the model's dtype
    whole_prompts: bool = False  # a prompt is one step's, and nobody decodes in that
    max_len: int = 0  # tokens of a row, at most; 0: nobody says, and as many as its request may have
    stages: int = 1  # steps in flight at once, with disjoint requests; 1: a step may be launched behind its own
    reserved_tokens: int = 0  # room that a request has from its start to its end, however short it is
    held_share: float = 0.5  # of all blocks, that sequences without a request may hold


@dataclass(slots=True)
class Delta:
    """What one commit added to one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: bool = False  # true in the request's last delta only


@dataclass
class SchedulerStats:
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    rejected: int = 0


class Lifecycle:
    def __init__(self, limits: Limits, kv: KVManager, policy: Policy, isolation: Isolation) -> None:
        self.limits, self.kv, self.policy, self.isolation = limits, kv, policy, isolation
        self.waiting = WaitingQueue(policy)
        self.parked: dict[str, Request] = {}
        self.running: list[Request] = []  # most important first
        self.requests: dict[str, Request] = {}  # everything not finished
        self.deadlines: list[tuple[float, int, Request]] = []  # a heap; the number breaks ties
        self._num_deadlines = 0  # so far
        self.stats = SchedulerStats()
        self.free_rows = list(range(limits.max_rows - 1, -1, -1))
        self.num_promoted = 0  # running above their class
        self.num_compiling = 0  # parked until their grammars are compiled: they count as queued
        self.events: list[Delta] = []  # finished outside of a commit
        self.adapters: AdapterPool | None = None  # where requests may name one
        self.held = HeldSequences(kv, int(limits.held_share * kv.pool.num_blocks))
        self.modules: Modules | None = None

    def register(self, request: Request) -> None:
        self.requests[request.id] = request
        if self.adapters is not None and request.adapter_key:
            self.adapters.enter(request)
        if request.deadline is None:
            return
        self._num_deadlines += 1
        heapq.heappush(self.deadlines, (request.deadline, self._num_deadlines, request))
        if len(self.deadlines) > 64 + 2 * len(self.requests):  # most of them ended long before their deadline
            self.deadlines = [entry for entry in self.deadlines if entry[2].state is not FINISHED]
            heapq.heapify(self.deadlines)

    def queue(self, request: Request, place: int | None = None) -> None:
        """It may run as soon as there is room; place: the one that it had before (`WaitingQueue.place`)."""
        if request.state is PARKED:
            self._unpark(request)
        if self.adapters is not None and request.adapter_key and not self.adapters.acquire(request):
            self.park(request, Wait.ADAPTER)
            self.adapters.ask(request, self.waiting.next_place if place is None else place)
            return
        request.state, request.waits_for = WAITING, None
        self.waiting.push(request, place)

    def park(self, request: Request, why: Wait) -> None:
        """It holds nothing and may not run before something else has happened."""
        request.state, request.waits_for = PARKED, why
        self.parked[request.id] = request
        self.num_compiling += why is Wait.GRAMMAR

    def _unpark(self, request: Request) -> None:
        del self.parked[request.id]
        self.num_compiling -= request.waits_for is Wait.GRAMMAR

    def start(self, request: Request, lane: int) -> None:
        """Give a waiting request a row."""
        self.waiting.remove(request)
        request.state = RUNNING
        request.row = self.free_rows.pop()
        request.lane = lane
        request.promoted = 0 <= lane < self.policy.lane(request)
        self.num_promoted += request.promoted
        insort(self.running, request, key=importance)

    def leave(self, request: Request) -> None:
        """Take row and blocks from a running request; launched steps may still read the blocks."""
        self._leave(request)
        self.kv.release(request, request.fence)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)
        request.row = -1
        request.drafts, request.copied = [], []
        self.num_promoted -= request.promoted
        request.promoted = False

    def preempt(self, request: Request) -> None:
        """Give up row and blocks; the tokens stay. What was computed is brought back from another place when there is
        room, or computed again."""
        request.metrics.preemptions += 1
        self.stats.preemptions += 1
        if self.kv.transfers is not None:
            self.kv.transfers.save(request)
        self.leave(request)
        if request.waits_for is Wait.ROUND:
            self.park(request, Wait.ROUND)
        else:  # it comes back when its launched steps are committed: whoever enters has work
            self.queue(request)

    def take_in_adapters(self, now: float) -> None:
        """Those whose adapters have a slot now are queued at their old places."""
        assert self.adapters is not None
        granted, failed = self.adapters.turn(now)
        for request, place in granted:
            self.queue(request, place)
        for request, why in failed:
            request.error = why
            self.finish(request, Finish.ERROR, now)

    def free_a_slot(self, wanting: Request) -> None:
        """Have the slot of an adapter given up by those who hold it, for somebody who has to run before them."""
        assert self.adapters is not None
        for request in self.adapters.in_the_way(wanting):
            if request.state is RUNNING:
                self.preempt(request)
            self.adapters.give_back(request)
            if request.state is WAITING:
                self.waiting.remove(request)
                self.park(request, Wait.ADAPTER)
                self.adapters.ask(request, None)

    def lose_slots(self) -> None:
        """What was on the device is gone, adapters included. Those who run are preempted next, and ask then."""
        holders = [] if self.adapters is None else self.adapters.lose()
        for request in holders:
            if request.state is WAITING:
                self.waiting.remove(request)
                self.park(request, Wait.ADAPTER)
                assert self.adapters is not None
                self.adapters.ask(request, None)

    def change_lane(self, request: Request, lane: int) -> None:
        """Another importance for a request that runs."""
        self.running.remove(request)
        request.lane = lane
        insort(self.running, request, key=importance)

    def release_followers(self, leader: Request) -> None:
        """The leader's prompt is computed (or will never be): siblings may enter, forking it if they can."""
        for follower in leader.followers:
            if follower.state is PARKED:
                follower.fork_from = leader
                follower.fork_tokens = leader.prompt_len - 1  # each computes the last prompt token for its own logits
                self.queue(follower)
        leader.followers = []

    def finish(self, request: Request, why: Finish, now: float, report: bool = True) -> None:
        """The end, from any place. `report`: whoever waits hears of it outside of a commit."""
        if request.state is FINISHED:
            return
        may_keep = request.keep and request.num_exact >= request.num_computed
        if request.state is RUNNING and may_keep and why in (Finish.STOP, Finish.LENGTH):
            self._leave(request)
            self.held.take_over(request)
        elif request.state is RUNNING:
            self.leave(request)
        elif request.state is PARKED:
            if request.waits_for is Wait.TRANSFER and self.kv.transfers is not None:
                self.kv.transfers.gave_up(request)
            if self.modules is not None:
                self.modules.gave_up(request)
            self._unpark(request)
        else:
            self.waiting.remove(request)
        request.state, request.waits_for = FINISHED, None
        request.finish = why
        request.metrics.finished = now
        del self.requests[request.id]
        if self.adapters is not None and request.adapter_key:
            self.adapters.release(request)
        if self.isolation.cases:
            self.isolation.forget(request)
        if request.is_module and self.modules is not None:
            self.modules.ended(request)
        else:
            self.policy.learn(request)
        if request.followers:
            self.release_followers(request)
        request.fork_from = None
        if request.beams is not None:
            self._finish_beams(request, request.beams, why, now, report)
        elif report:
            self.events.append(Delta(request, finished=True))

    def _finish_beams(self, request: Request, beams: Beams, why: Finish, now: float, report: bool) -> None:
        """No beam outlives another; the user hears of it once, through the leader."""
        beams.leader.error = beams.leader.error or request.error
        for other in beams.live:
            self.finish(other, why, now, report=False)
        if report:
            self.events.append(Delta(beams.leader, finished=True))

    def take_turn(self, beams: Beams, turn: Turn) -> None:
        """A round of beams is over: survivors go on, dropped ones start over as forks of survivors."""
        for request in turn.forks:
            if request.state is RUNNING:
                self.leave(request)
                request.state = WAITING
            elif request.id not in self.requests:
                self.register(request)
        for request in beams.live:
            if request.state in (WAITING, PARKED) and request not in self.waiting:
                self.queue(request)

    def expire(self, now: float) -> None:
        while self.deadlines and self.deadlines[0][0] < now:
            request = heapq.heappop(self.deadlines)[2]
            if request.state is not FINISHED:
                request.error = f"its deadline passed {now - request.arrival:.3f} s after it arrived"
                self.finish(request, Finish.DEADLINE, now)

    def may_promote(self) -> bool:
        """At most an eighth of the rows may be held by requests that rose above their class."""
        return self.num_promoted < max(1, self.limits.max_rows // 8)

    def check_integrity(self) -> None:
        """Prove that rows and blocks are all accounted for; cheap enough to run whenever the engine is idle."""
        self.kv.check_integrity([*self.running, *self.held])
        if self.kv.transfers is not None:
            waiting = {id(request) for request in self.parked.values() if request.waits_for is Wait.TRANSFER}
            self.kv.transfers.check_integrity(waiting)
        if self.modules is not None:
            self.modules.check_integrity()
        if self.held.num_blocks != sum(len(one.blocks) for one in self.held):
            raise AssertionError(f"held sequences have other blocks than the {self.held.num_blocks} that are counted")
        rows = sorted([*self.free_rows, *(request.row for request in self.running)])
        if rows != list(range(self.limits.max_rows)):
            raise AssertionError(f"rows lost or doubly owned: {len(self.free_rows)} free, {len(self.running)} running")
        if self.adapters is not None:
            self.adapters.check_integrity(self.requests)
        places = len(self.waiting) + len(self.running) + len(self.parked)
        if places != len(self.requests):
            raise AssertionError(f"{len(self.requests)} requests are alive but {places} have a place")


def importance(request: Request) -> tuple[int, float]:
    return request.lane, request.arrival
