"""Replica: the real scheduler and KV manager in simulated time, and a job's way through lives on replicas."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tokenmill.engine.request import Request
from tokenmill.engine.scheduler import Delta, Limits, Scheduler
from tokenmill.engine.scheduler.control import pace_for
from tokenmill.engine.scheduler.policy import Policy
from tokenmill.engine.speculation.proposer import MAX_DRAFTS
from tokenmill.engine.step import Step, StepResult
from tokenmill.errors import ConfigError
from tokenmill.kv.events import CacheLog
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams
from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.simulator.host_memory import HostMemory, SimulatedHostTier, transfers_of
from tokenmill.plan.simulator.leap import leap, steady_steps
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.solve.drafts import Drafts
from tokenmill.step_time import Facts, StepTimeModel, facts_of

STOP = 0  # the token that ends an answer
OUTPUT = 1 << 31  # answers are made of this plus the job's number: nobody else's blocks look like them
SHORTEST_LEAP = 2  # steps for which a leap is worth its books
MAX_TOKENS = 1 << 20  # users leave max_tokens at what the model can: nobody knows the length before it is there
PARAMS = SamplingParams(temperature=0, max_tokens=None)
CacheListener = Callable[[list[bytes], list[bytes]], None]  # identities that were stored, and that were evicted


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One request of the workload. It may live on several replicas, one after the other."""

    number: int
    arrival: float
    tokens: list[int]  # the prompt, then what was generated; emptied at the end
    prompt: int
    output: int  # tokens that it will have
    times: list[float] = field(default_factory=list)  # of its tokens
    lives: int = 0
    preemptions: int = 0
    cached: int = 0  # prompt tokens that the first replica had in its cache
    found: int = 0  # leading tokens that the router believes to be cached where it sent it
    load: int = 0  # what the router booked for it where it is now


@dataclass(frozen=True)
class ReplicaSpec:
    """How every replica of a pool is set up."""

    machine: Machine
    block_size: int = 16
    policy: Callable[[], Policy] | None = None  # None: first come, first served by class
    prefix_caching: bool = True
    eviction: str = "lru"
    watermark: float = 0.01
    slo_itl_ms: float | None = None
    slo_ttft_ms: float | None = None
    leaps: bool = True  # stretches of pure decoding at once: the same times, sooner
    drafts: Drafts | None = None
    host_memory: HostMemory | None = None  # a tier of KV; None: none

    def with_limits(self, rows: int | None = None, step_tokens: int | None = None) -> ReplicaSpec:
        machine = self.machine
        rows = rows or machine.max_rows
        tokens = max(step_tokens or machine.step_tokens, rows)
        return replace(self, machine=replace(machine, max_rows=rows, step_tokens=tokens))

    def led_by(self, slo: Slo) -> ReplicaSpec:
        """With the controller that keeps these promises, as far as they are made."""
        if not math.isfinite(slo.itl):
            raise ConfigError("the controller follows the gaps between tokens; give --slo an itl")
        ttft = 1000 * slo.ttft if math.isfinite(slo.ttft) else None
        return replace(self, slo_itl_ms=1000 * slo.itl, slo_ttft_ms=ttft)


class Replica:
    """One engine's loop: schedule, launch, commit the step before. Tokens are made up; what they cost is not.

    `now` is when the results of the last committed step are there; whoever drives it lets no newcomer in that comes
    later than that. `wake` is when it wants to be driven next.
    """

    def __init__(self, number: int, spec: ReplicaSpec, now: float = 0.0) -> None:
        self.number = number
        self.spec = spec
        self.now = now
        self.wake: float | None = None
        self.busy = 0.0  # seconds that its device worked; of a pipeline's stages the mean
        self.policies: list[Policy] = []  # of each time that it was started: what all learned is counted at the end
        self._steps_before = 0  # it died last
        self.open = True  # it takes new work; kept by the cluster
        self.load = 0  # tokens, kept by the cluster
        self.seconds_per_token = 1.0  # routers count in tokens here
        self._tell: CacheListener | None = None
        self.jobs: dict[str, SimulatedJob] = {}  # by the id of the request that is the job's present life
        self.inbox: list[tuple[SimulatedJob, int]] = []  # and how many tokens this life is to have in all
        self.transferred: deque[SimulatedJob] = deque()  # keys and values are here; they wait for memory and a row
        self._ends: dict[str, int] = {}  # request id -> output tokens of this life
        self._depth = max(spec.machine.stages - 1, int(spec.machine.overlap))
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._free_at = now  # its last stage
        self._stages_free_at = [now] * spec.machine.stages
        self._plan: list[float] = []  # moments of the commits of a leap that is not taken yet
        self._finished: list[Request] = []  # in the step that is done at `now`
        self._host: SimulatedHostTier | None = None
        self._random = random.Random(f"{number}/drafts")
        self.scheduler = self._build()

    def on_cache_change(self, tell: CacheListener) -> None:
        """From now on, and as long as it lives: identities that its prefix cache learned and forgot in a turn."""
        self._tell = tell
        self.scheduler.kv.index.log = CacheLog()

    def _tell_changes(self) -> None:
        log = self.scheduler.kv.index.log
        if log and self._tell is not None:
            self._tell(*log.take())

    def _build(self) -> Scheduler:
        spec, machine = self.spec, self.spec.machine
        verified = min(1 + MAX_DRAFTS, machine.step_tokens)
        limits = Limits(
            machine.max_rows,
            machine.step_tokens,
            max_verified=verified,
            watermark=spec.watermark,
            stages=machine.stages,
        )
        kv = KVManager(machine.kv_tokens // spec.block_size, spec.block_size, spec.prefix_caching, spec.eviction)
        if spec.host_memory is not None:
            block_bytes = machine.kv_bytes * spec.block_size
            clock = lambda: self.now  # noqa: E731
            kv.transfers, self._host = transfers_of(
                spec.host_memory, kv, block_bytes, machine.step_time, clock, bell=self
            )
        pace = pace_for(limits, spec.slo_itl_ms, spec.slo_ttft_ms)
        scheduler = Scheduler(limits, kv, spec.policy() if spec.policy is not None else None, pace=pace)
        self.policies.append(scheduler.policy)
        return scheduler

    @property
    def steps(self) -> int:
        """Since it was first there, whether it died in between or not."""
        return self._steps_before + self.scheduler.stats.steps

    @property
    def outstanding(self) -> int:
        return len(self.jobs) + len(self.inbox) + len(self.transferred)

    def submit(self, job: SimulatedJob, at: float, tokens: int | None = None) -> None:
        """A job comes at this moment, to stay until its end or until it has `tokens` output tokens."""
        self.inbox.append((job, tokens or job.output))
        self._interrupt(at)

    def submit_with_kv(self, job: SimulatedJob, at: float) -> None:
        """A job comes with its keys and values: only its last tokens are computed here."""
        self.transferred.append(job)
        self._interrupt(at)

    def _interrupt(self, at: float) -> None:
        if self.wake is None:
            self.now = self.wake = at
        elif self._plan and self.scheduler.has_free_row:  # it could start: the leap ends with the step that is running
            del self._plan[bisect_left(self._plan, at) + 1 :]
            self.wake = self._plan[-1]

    def drive(self) -> list[SimulatedJob]:
        """Time is `wake`: hear what ended, let newcomers in, start what comes next. Returns the jobs that ended."""
        self._take_leap(len(self._plan))
        ended = [self._take_out(request) for request in self._finished]
        self._finished = []
        for job, tokens in self.inbox:
            self.scheduler.add(self._request(job, tokens))
        self.inbox.clear()
        self._admit_transferred()
        self.wake = None
        while self.scheduler.has_work or self._in_flight:
            if self._make_plan() or self._turn():
                break
        self._tell_changes()
        return ended

    def _turn(self) -> bool:
        """One turn of the engine's loop; whether it moved time (or has nothing to wait for)."""
        if self.spec.drafts is not None and self.spec.machine.stages == 1:
            self._propose(self.spec.drafts)
        if self._host is not None:
            self.scheduler.take_in_transfers()
        step = self.scheduler.schedule(self.now)
        if step is not None:
            seconds = self.spec.machine.step_time.seconds(facts_of(step))
            self._pass_stages(seconds)
            self._in_flight.append((step, self._free_at))
        if not self._in_flight and self._host is not None and self._host.next_due is not None:
            self.wait(math.inf)
            self.wake = self.now
            return True
        if not self._in_flight:
            raise AssertionError(f"{len(self.scheduler.requests)} requests, and none of them can run")
        if step is not None and len(self._in_flight) <= self._depth:
            return False
        done, self.now = self._in_flight.popleft()
        self._finished += [delta.request for delta in self._commit(done) if delta.finished]
        self.wake = self.now
        return True

    def wait(self, seconds: float) -> None:
        """As a bell: time passes until a copy has ended."""
        if self._host is not None and self._host.next_due is not None:
            self.now = max(self.now, min(self.now + seconds, self._host.next_due))

    def _pass_stages(self, seconds: float) -> None:
        """A step that takes so long in all begins as soon as the first stage is free."""
        done, stages = self.now, self._stages_free_at
        stages[-1] = self._free_at  # a leap moves it
        for stage, free_at in enumerate(stages):
            done = stages[stage] = max(done, free_at) + seconds / len(stages)
        self._free_at = done
        self.busy += seconds / len(stages)

    def _propose(self, drafts: Drafts) -> None:
        """As the engine's loop: nothing is drafted beside prompts, nor when some are about to be read."""
        scheduler = self.scheduler
        running = scheduler.running
        if not running or (scheduler.read_prompts and len(scheduler.waiting) and scheduler.has_free_row):
            return
        if any(one.num_tokens <= one.prompt_len for one in running):
            return
        limits, context = scheduler.limits, sum(one.num_tokens for one in running)
        room = min(max(limits.max_rows, limits.max_verified), limits.max_step_tokens)
        count = drafts.best(self.spec.machine.step_time, len(running), context, room)
        for one in running if count else ():
            one.drafts = [OUTPUT] * (one.unsure + count)

    def _commit(self, step: Step) -> list[Delta]:
        tokens: list[list[int]] = []
        for request, samples in zip(step.requests, step.samples):
            left = max(1, self._ends.get(request.id, 0) - request.num_output)  # none: it ended while this step was out
            said = [OUTPUT + request.seed] * min(left, 1 + self._held(samples - 1)) if samples else []
            if len(said) == left:
                said[-1] = STOP
            tokens.append(said)
        return self.scheduler.commit(step, StepResult(tokens=tokens), self.now)

    def _held(self, drafts: int) -> int:
        """How many of so many drafts turn out right."""
        held = 0
        while held < drafts and self.spec.drafts is not None and self._random.random() < self.spec.drafts.acceptance:
            held += 1
        return held

    def _make_plan(self) -> bool:
        """Foresee a stretch of pure decoding, which newcomers may cut short."""
        running = self.scheduler.running
        if (
            self._host is not None
            or not self.spec.leaps
            or len(self._in_flight) != self._depth
            or self.spec.slo_itl_ms is not None
        ):
            return False
        if (
            self.spec.drafts is not None or self.spec.machine.stages > 1
        ):  # how far a step gets is drawn; or who is in it
            return False
        if self._depth and len(self._in_flight[0][0].requests) != len(running):  # somebody in it is gone already
            return False
        ends = self._ends
        steps = steady_steps(self.scheduler, self._depth, lambda request: ends[request.id] - request.num_output)
        if steps < SHORTEST_LEAP:
            return False
        rows, step_time = len(running), self.spec.machine.step_time
        context = sum(request.num_computed for request in running) + rows
        self._plan = _moments(step_time, rows, context, max(self._free_at, self.now), steps, self._depth)
        self.wake = self._plan[-1]
        return True

    def _take_leap(self, steps: int) -> None:
        """Do the first steps of the plan and forget the rest."""
        if self._plan and steps:
            times = self._plan[:steps]
            began = max(self._free_at, self.now)
            leap(self.scheduler, times, lambda request: OUTPUT + request.seed)
            self.now = self._free_at = times[-1]
            if self._depth:  # one more step is out: what it costs was not in the plan's moments
                rows = len(self.scheduler.running)
                context = sum(request.num_computed for request in self.scheduler.running)
                self._free_at += self.spec.machine.step_time.seconds(_decoding(rows, context))
                self._in_flight[0] = (self._in_flight[0][0], self._free_at)
            self.busy += self._free_at - began
        self._plan = []

    def _request(self, job: SimulatedJob, tokens: int) -> Request:
        job.lives += 1
        made = len(job.tokens) - job.prompt
        request = Request(
            f"{job.number}.{job.lives}",
            job.tokens,
            PARAMS,
            max_tokens=MAX_TOKENS,
            seed=job.number,
            stop_ids=frozenset((STOP,)),
            arrival=job.arrival,
        )
        self.jobs[request.id] = job
        self._ends[request.id] = tokens - made
        return request

    def _take_out(self, request: Request) -> SimulatedJob:
        """A life is over: what it made is the job's."""
        job = self.jobs.pop(request.id)
        del self._ends[request.id]
        if job.lives == 1:
            job.cached = request.metrics.cached_tokens
        job.preemptions += request.metrics.preemptions
        job.times += request.metrics.token_times
        made = request.num_output
        job.tokens += [OUTPUT + job.number] * made
        return job

    def _admit_transferred(self) -> None:
        """Write the keys and values that have arrived into blocks, in order, as rows and memory come free."""
        if not self.transferred:
            return
        kv, scheduler = self.scheduler.kv, self.scheduler
        free = kv.pool.num_free - int(self.spec.watermark * kv.pool.num_blocks)
        rows = self.spec.machine.max_rows - len(scheduler.running) - len(scheduler.waiting)
        while self.transferred and rows > 0:
            tokens = len(self.transferred[0].tokens)
            if kv.blocks_for(tokens) > free and (scheduler.running or len(scheduler.waiting)):
                return
            job = self.transferred.popleft()
            request = self._request(job, job.output)
            kv.admit(request, kv.match(request))
            if kv.grow(request, tokens - 1) is not None:
                request.num_computed = tokens - 1
                kv.publish(request)
            kv.release(request, 0)  # full blocks wait with their content: the next step finds them as a prefix
            scheduler.add(request)
            free, rows = free - kv.blocks_for(tokens), rows - 1

    def die(self, at: float) -> list[SimulatedJob]:
        """Everything in memory is lost, what clients have received is not. Returns the jobs to be taken elsewhere."""
        self._take_leap(bisect_left(self._plan, at))
        lost = [job for job, _ in self.inbox] + list(self.transferred)
        self.inbox.clear()
        self.transferred.clear()
        alive = [*self.scheduler.requests.values(), *self._finished]
        for request in alive:
            late = len(request.metrics.token_times) - bisect_left(request.metrics.token_times, at)
            if late:  # committed ahead of time, never sent
                del request.metrics.token_times[-late:], request.tokens[-late:]
            lost.append(self._take_out(request))
        self._finished, self.wake = [], None
        self._in_flight.clear()
        self._steps_before = self.steps
        self.scheduler = self._build()
        self.now = self._free_at = at
        self._stages_free_at = [at] * self.spec.machine.stages
        return lost


def _decoding(rows: int, context: int) -> Facts:
    """A step in which nobody reads a prompt."""
    return Facts(decode_rows=rows, decode_context=context, sampled=rows)


def _moments(model: StepTimeModel, rows: int, context: int, start: float, steps: int, depth: int) -> list[float]:
    """When each of `steps` decode steps is committed; with depth 1 the first is launched and ends at `start`."""
    moments = [start] if depth else []
    at = start
    for number in range(steps - depth):
        at += model.seconds(_decoding(rows, context + number * rows))
        moments.append(at)
    return moments
