"""Cluster: many replicas behind a router, as one queue of events. Splits, failures and autoscaling happen here."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.plan.simulator.autoscale import Autoscale
from tokenmill.plan.simulator.faults import Failures
from tokenmill.plan.simulator.replica import Replica, ReplicaSpec, SimulatedJob
from tokenmill.plan.simulator.result import SimulationResult
from tokenmill.plan.simulator.router import SimulatedRouter
from tokenmill.routing.routers import TYPICAL_OUTPUT

TOLD_EVERY = 256  # events

Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ClusterSpec:
    """Replicas, the router before them, and what happens to them."""

    replica: ReplicaSpec
    replicas: int = 1
    router: str = "least-loaded"
    prefill: int = 0  # replicas that only read prompts; the others then only decode; 0: all do both
    link_bytes: float = 50e9  # per second, out of one prefill replica
    link_latency: float = 1e-3
    failures: Failures | None = None
    autoscale: Autoscale | None = None
    seed: int = 0


class Cluster:
    """Events in the order of time; ties in the order they were made. One run, from a list of jobs to an outcome."""

    def __init__(
        self,
        spec: ClusterSpec,
        prompt_of: Callable[[SimulatedJob], list[int]],
        report: Report = lambda done, total, what: None,
    ) -> None:
        self.spec = spec
        self._prompt_of = prompt_of
        self.replicas = [Replica(number, spec.replica) for number in range(spec.replicas)]
        self.outcome = SimulationResult(gpus_per_replica=spec.replica.machine.gpus)
        self._router = SimulatedRouter(spec.router, spec.seed, spec.replica.block_size)
        self._second = SimulatedRouter("least-loaded")  # for the decode pool
        for replica in self.replicas:
            self._router.watch(replica)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._sequence = 0
        self._open = [True] * spec.replicas  # takes new work
        self._up_since: list[float | None] = [0.0] * spec.replicas  # None: down or let go
        self._link_free = [0.0] * spec.replicas
        self._unrouted: list[tuple[SimulatedJob, bool]] = []  # nobody is up: (job, it has its keys and values with it)
        self._left = 0
        self._calm = 0
        self._starting = 0
        self._report = report

    def run(self, jobs: list[SimulatedJob]) -> SimulationResult:
        total = self._left = len(jobs)
        horizon = jobs[-1].arrival
        if self.spec.failures is not None:
            for at, number in self.spec.failures.schedule(self.spec.replicas, horizon):
                self._at(at, lambda now, one=number: self._fail(one, now))  # type: ignore[misc]
        if self.spec.autoscale is not None:
            self._at(self.spec.autoscale.interval, self._autoscale)
        coming = iter(jobs)
        upcoming = next(coming, None)
        now, happened = 0.0, 0
        while self._left:
            if upcoming is not None and (not self._events or upcoming.arrival <= self._events[0][0]):
                now = upcoming.arrival
                self._arrive(upcoming, now)
                upcoming = next(coming, None)
            else:
                now, _, happen = heapq.heappop(self._events)
                happen(now)
            happened += 1
            if happened % TOLD_EVERY == 0:
                self._report(total - self._left, total, "requests simulated")
        self._report(total, total, "requests simulated")
        self._close(now)
        return self.outcome

    def _at(self, moment: float, what: Callable[[float], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (moment, self._sequence, what))

    def _arrive(self, job: SimulatedJob, now: float) -> None:
        machine = self.spec.replica.machine
        if job.prompt + job.output >= machine.kv_tokens * 0.98:
            self.outcome.refused += 1
            self._left -= 1
            return
        job.tokens = self._prompt_of(job)
        self._send(job, now)

    def _pool(self, decode: bool) -> list[Replica]:
        split = self.spec.prefill
        first, last = (split, None) if decode and split else (0, split or None)
        return [one for one in self.replicas[first:last] if self._open[one.number]]

    def _send(self, job: SimulatedJob, now: float, with_kv: bool = False) -> None:
        """Route a job: a new one, one whose replica died, or one that comes from the prefill pool with its memory."""
        pool = self._pool(decode=with_kv)
        if not pool:
            self._unrouted.append((job, with_kv))
            return
        replica = (self._second if with_kv else self._router).choose(job, pool)
        job.load = len(job.tokens) - job.found + TYPICAL_OUTPUT
        replica.load += job.load
        before = replica.wake
        if with_kv:
            replica.submit_with_kv(job, now)
        elif self.spec.prefill:
            replica.submit(job, now, len(job.tokens) - job.prompt + 1)
        else:
            replica.submit(job, now)
        if replica.wake != before:
            self._call(replica)

    def _call(self, replica: Replica) -> None:
        moment = replica.wake
        if moment is not None:
            self._at(moment, lambda now: self._drive(replica, moment))

    def _drive(self, replica: Replica, moment: float) -> None:
        if replica.wake != moment:  # it was called for an earlier moment since, or it died
            return
        ended = replica.drive()
        self._call(replica)
        for job in ended:
            replica.load -= job.load
            if len(job.times) < job.output:
                self._hand_over(job, replica, moment)
            else:
                self._left -= 1
                self.outcome.add(job)
        if not self._open[replica.number] and not replica.outstanding:
            self._let_go(replica, moment)

    def _hand_over(self, job: SimulatedJob, sender: Replica, now: float) -> None:
        """Its first token is out; keys and values go over the sender's link, one job after the other."""
        size = len(job.tokens) * self.spec.replica.machine.kv_bytes
        start = max(now, self._link_free[sender.number])
        self._link_free[sender.number] = done = start + size / self.spec.link_bytes
        self.outcome.transferred += size
        self._at(done + self.spec.link_latency, lambda moment: self._send(job, moment, with_kv=True))

    def _fail(self, number: int, now: float) -> None:
        replica = self.replicas[number]
        if self._up_since[number] is None or not self._open[number]:
            return
        self.outcome.failures += 1
        self._stop(number, now)
        lost = replica.die(now)
        replica.load = 0
        self._router.forget(replica)
        self._router.watch(replica)
        assert self.spec.failures is not None
        self._at(now + self.spec.failures.repair_seconds, lambda moment: self._start(number, moment))
        for job in lost:
            self.outcome.moved += 1
            self._send(job, now)

    def _stop(self, number: int, now: float) -> None:
        since = self._up_since[number]
        if since is not None:
            self.outcome.replica_seconds += now - since
        self._open[number], self._up_since[number] = False, None

    def _start(self, number: int, now: float) -> None:
        self._open[number], self._up_since[number] = True, now
        waiting, self._unrouted = self._unrouted, []
        for job, with_kv in waiting:
            self._send(job, now, with_kv)

    def _autoscale(self, now: float) -> None:
        scale = self.spec.autoscale
        assert scale is not None
        present = sum(self._open) + self._starting
        outstanding = sum(one.outstanding for one in self.replicas) + len(self._unrouted)
        wanted, self._calm = scale.wanted(outstanding, present, self._calm)
        for _ in range(wanted - present):
            self._starting += 1
            self._at(now + scale.startup, self._grow)
        if wanted < present:
            open_ones = [one for one in self.replicas if self._open[one.number]]
            for replica in sorted(open_ones, key=lambda one: one.load)[: present - wanted]:
                self._open[replica.number] = False  # it finishes what it has
                if not replica.outstanding:
                    self._let_go(replica, now)
        self.outcome.scale.append((now, sum(self._open)))
        if self._left:
            self._at(now + scale.interval, self._autoscale)

    def _grow(self, now: float) -> None:
        self._starting -= 1
        number = len(self.replicas)
        self.replicas.append(Replica(number, self.spec.replica, now))
        self._router.watch(self.replicas[number])
        self._open.append(True)
        self._up_since.append(None)
        self._link_free.append(0.0)
        self._start(number, now)

    def _let_go(self, replica: Replica, now: float) -> None:
        self._stop(replica.number, now)
        self._router.forget(replica)

    def _close(self, now: float) -> None:
        for number in range(len(self.replicas)):
            self._stop(number, now)
        self.outcome.close(now, self.replicas)
