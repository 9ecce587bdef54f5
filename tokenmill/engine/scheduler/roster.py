"""Roster: who waits, who runs, who holds which row, and every way a request changes between them."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from tokenmill.engine.beams import Beams
from tokenmill.engine.request import Finish, Request, State
from tokenmill.engine.scheduler.batching import Batching
from tokenmill.engine.scheduler.policy import Policy, PriorityClasses, WaitingQueue
from tokenmill.engine.step import NOT_FINITE
from tokenmill.errors import QueueFull
from tokenmill.kv.manager import KVManager
from tokenmill.sampling.grammar import Constraint
from tokenmill.sampling.records import TokenLogprobs

MAX_FAILURES = 2  # after this many failed steps a request is tried alone
MAX_FAILURES_ALONE = 2  # and after this many failures alone it is given up

WAITING, RUNNING, FINISHED = State.WAITING, State.RUNNING, State.FINISHED  # an enum's members are slow to look up


@dataclass(frozen=True)
class Limits:
    """What one step and the queue may hold."""

    max_rows: int
    max_step_tokens: int  # at least max_rows, so that every running request can decode in every step
    max_queued_requests: int = 100_000
    max_queued_tokens: int = 50_000_000
    watermark: float = 0.01  # share of blocks kept free at admission, so that running requests can grow
    may_widen: bool = False  # the runner can compute rows in a wider precision than the model's
    whole_prompts: bool = False  # a prompt is one step's, and nobody decodes in that
    reserved_tokens: int = 0  # room that a request has from its start to its end, however short it is


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


class Roster:
    """The books of the scheduler. Every request that is alive has exactly one place: the queue, a row, or dormant."""

    def __init__(
        self, limits: Limits, kv: KVManager, policy: Policy | None = None, batching: Batching | None = None
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.policy = policy or PriorityClasses()
        self.batching = batching or Batching()
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Request] = []  # most important first
        self.requests: dict[str, Request] = {}  # everything not finished
        self.stats = SchedulerStats()
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._suspects: deque[Request] = deque()
        # Alive but not queued: followers that wait for their leader's prompt, preempted beams that wait for their round
        self._dormant: dict[str, Request] = {}
        self._compiling: dict[str, Request] = {}  # their grammars are: not queued yet
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; the number breaks ties
        self._registered = 0
        self._num_promoted = 0
        self._events: list[Delta] = []  # finished outside of a commit

    def add(self, request: Request) -> None:
        """Queue a request, and with it the followers that will fork from its prompt."""
        waiting = len(self.waiting) + len(self._compiling)
        if waiting >= self.limits.max_queued_requests:
            self.stats.rejected += 1
            raise QueueFull(
                f"{waiting} requests are waiting, the limit is {self.limits.max_queued_requests}; "
                "try again later or raise max_queued_requests"
            )
        if self.waiting.num_tokens + len(request.tokens) > self.limits.max_queued_tokens and len(self.waiting):
            self.stats.rejected += 1
            raise QueueFull(
                f"{self.waiting.num_tokens} tokens are waiting, the limit is {self.limits.max_queued_tokens}; "
                "try again later or raise max_queued_tokens"
            )
        for one in [request, *request.followers]:
            self._register(one)
        for follower in request.followers:
            self._dormant[follower.id] = follower
        if request.awaits_mask:
            self._compiling[request.id] = request
        else:
            self.waiting.push(request)

    def grammar_moved(self, constraint: Constraint, now: float) -> None:
        """A request's grammar was compiled, its next mask is there, or it came to its end, good or bad."""
        request = self.requests.get(constraint.id)
        if request is None or request.grammar is not constraint:  # it ended meanwhile; its id may be another's
            return
        self._end_with_grammar(request, now)
        if self._compiling.pop(request.id, None) is not None:
            self.waiting.push(request)

    def _end_with_grammar(self, request: Request, now: float, report: bool = True) -> None:
        assert request.grammar is not None
        if request.grammar.error is not None:
            request.error = request.grammar.error
            self._finish(request, Finish.ERROR, now, report)
        elif request.grammar.complete:
            self._finish(request, Finish.STOP, now, report)

    def cancel(self, id: str, now: float, why: Finish = Finish.CANCELLED) -> None:
        """End a request at any moment. Tokens of launched steps are dropped."""
        request = self.requests.get(id)
        if request is not None:
            self._finish(request, why, now)

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._events)  # an end that nobody has heard of is work, too

    def drain_events(self) -> list[Delta]:
        """Requests that ended outside of a commit (cancelled, expired)."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Prove that rows and blocks are all accounted for; cheap enough to run whenever the engine is idle."""
        self.kv.check_integrity(self.running)
        rows = sorted([*self._free_rows, *(request.row for request in self.running)])
        if rows != list(range(self.limits.max_rows)):
            raise AssertionError(f"rows lost or doubly owned: {len(self._free_rows)} free, {len(self.running)} running")
        homes = len(self.waiting) + len(self.running) + len(self._dormant) + len(self._compiling)
        if homes != len(self.requests):
            raise AssertionError(f"{len(self.requests)} requests are alive but {homes} have a place")

    def _register(self, request: Request) -> None:
        self.requests[request.id] = request
        if request.deadline is not None:
            self._registered += 1
            heapq.heappush(self._deadlines, (request.deadline, self._registered, request))
            if len(self._deadlines) > 64 + 2 * len(self.requests):  # most of them ended long before their deadline
                self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
                heapq.heapify(self._deadlines)

    def _release_followers(self, leader: Request) -> None:
        """The leader's prompt is computed (or will never be): siblings may enter, forking it if they can."""
        for follower in leader.followers:
            if self._dormant.pop(follower.id, None) is not None:
                follower.fork_from = leader
                follower.fork_tokens = leader.prompt_len - 1  # each computes the last prompt token for its own logits
                self.waiting.push(follower)
        leader.followers = []

    def _preempt(self, request: Request) -> None:
        """Give up row and blocks; the tokens stay, and are computed again when there is room."""
        request.metrics.preemptions += 1
        self.stats.preemptions += 1
        self._leave(request)
        request.state = WAITING
        if request.beams is not None and request.held:
            self._dormant[request.id] = request
        else:
            request.held = False  # it comes back when its launched steps are committed: whoever enters has work
            self.waiting.push(request)

    def _leave(self, request: Request) -> None:
        """Take row and blocks from a running request; launched steps may still read the blocks."""
        self.running.remove(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.drafts = []
        self._num_promoted -= request.promoted
        request.promoted = False
        self.kv.release(request, request.fence)

    def _finish(self, request: Request, why: Finish, now: float, report: bool = True) -> None:
        if request.finished:
            return
        if request.state is RUNNING:
            self._leave(request)
        self.waiting.remove(request)
        self._dormant.pop(request.id, None)
        self._compiling.pop(request.id, None)
        if request.alone:
            self._suspects.remove(request)
            request.alone = False
        request.state = FINISHED
        request.finish = why
        request.metrics.finished = now
        del self.requests[request.id]
        self.policy.learn(request)
        self._release_followers(request)
        request.fork_from = None
        if request.beams is not None:
            self._finish_beams(request, request.beams, why, now, report)
        elif report:
            self._events.append(Delta(request, finished=True))

    def _finish_beams(self, request: Request, beams: Beams, why: Finish, now: float, report: bool) -> None:
        """No beam outlives another; the user hears of it once, through the leader."""
        beams.leader.error = beams.leader.error or request.error
        for other in beams.live:
            self._finish(other, why, now, report=False)
        if report:
            self._events.append(Delta(beams.leader, finished=True))

    def _append(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs], now: float) -> Delta:
        """Add sampled tokens until one ends the request."""
        kept, known, times = 0, request.tokens, request.metrics.token_times
        for token in tokens:
            if token < 0:
                self._not_finite(request, now, report=False)
                break
            kept += 1
            known.append(token)
            times.append(now)
            num_output = len(known) - request.prompt_len
            if num_output >= request.max_tokens or token in request.stop_ids:
                if token in request.stop_ids and num_output > request.params.min_tokens:
                    self._end(request, Finish.STOP, now)
                    break
                if num_output >= request.max_tokens:
                    self._end(request, Finish.LENGTH, now)
                    break
        if request.grammar is not None and kept and request.state is not FINISHED:
            request.grammar.advance(known[len(known) - kept :])
            self._end_with_grammar(request, now, report=False)
        if logprobs:
            logprobs = logprobs[:kept]
            request.logprobs += logprobs
            request.cumulative_logprob += sum(one.logprob for one in logprobs)
        if kept < len(tokens):
            tokens = tokens[:kept]
        return Delta(request, tokens, logprobs, request.state is FINISHED)

    def _end(self, request: Request, why: Finish, now: float) -> None:
        """It has its last token; where a batch ends as one, it waits for the others."""
        if not self.batching.keeps(request, why):
            self._finish(request, why, now, report=False)

    def _judge(self, request: Request, cause: str, now: float) -> None:
        """After a failed step: try again in company, then alone, then give up."""
        if request.alone:
            if request.failures >= MAX_FAILURES + MAX_FAILURES_ALONE:
                request.error = f"this request failed {request.failures} times, the last ones alone: {cause}"
                self._finish(request, Finish.ERROR, now)
        elif request.failures >= MAX_FAILURES:
            request.failures = MAX_FAILURES
            request.alone = True
            self._suspects.append(request)

    def _acquit(self, request: Request) -> None:
        """It got past the point where it failed."""
        request.failures = 0
        if request.alone:
            request.alone = False
            self._suspects.remove(request)
            if request.state is RUNNING:  # back to its class
                self.running.remove(request)
                request.lane = self.policy.lane(request)
                insort(self.running, request, key=importance)

    def _not_finite(self, request: Request, now: float, report: bool = True) -> None:
        if not self._tries_again(request):
            request.error = NOT_FINITE
            self._finish(request, Finish.ERROR, now, report)

    def _tries_again(self, request: Request) -> bool:
        """Its logits were no numbers. Others may have filled the blocks it started on, so it tries once on its own; and
        then once in a wider precision, where the runner has one."""
        self.kv.forget(request)
        alone = not request.started_on_others or request.distrustful
        if alone and (request.wide or not self.limits.may_widen):
            return False
        request.distrustful = True
        request.wide |= alone
        request.void_until = request.last_step
        request.held = False
        if request.state is RUNNING:
            self._preempt(request)
        elif self._dormant.pop(request.id, None):  # a beam that was preempted while its step was out
            self.waiting.push(request)
        return True

    def _advance_beams(self, beams: Beams, now: float, deltas: list[Delta]) -> None:
        """When every beam of a round is in: survivors go on, dropped ones start over as forks of survivors."""
        turn = beams.advance(now)
        if turn is None:
            return
        if turn.finish is not None:
            self._finish(beams.leader, turn.finish, now, report=False)
            deltas.append(Delta(beams.leader, finished=True))
            return
        for request in turn.forks:
            if request.state is RUNNING:
                self._leave(request)
                request.state = WAITING
            elif request.id not in self.requests:
                self._register(request)
        for request in beams.live:
            self._dormant.pop(request.id, None)
            if request.state is WAITING and request not in self.waiting:
                self.waiting.push(request)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                request.error = f"its deadline passed {now - request.arrival:.3f} s after it arrived"
                self._finish(request, Finish.DEADLINE, now)

    def _is_stuck(self) -> bool:
        """Whether all who run wait for one who does not (beams for a sibling): whoever can has to come in."""
        return all((r.held and not r.in_flight) or self.batching.is_done(r) for r in self.running)

    def _may_promote(self) -> bool:
        """At most an eighth of the rows may be held by requests that rose above their class."""
        return self._num_promoted < max(1, self.limits.max_rows // 8)


def importance(request: Request) -> tuple[int, float]:
    return request.lane, request.arrival
