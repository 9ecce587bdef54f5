"""A simulated replica against the engine's own loop, and leaps against steps."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.policy import Fcfs
from tokenmill.kv.manager import KVManager
from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.host_memory import HostMemory
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import PARAMS, STOP, Replica, ReplicaSpec, SimulatedJob
from tokenmill.plan.simulator.simulate import simulate
from tokenmill.step_time import LinearStepTime

COST = LinearStepTime(4e-3, 1e-4, 1e-6, 5e-5, 1e-8)


def machine(overlap, rows=8, tokens=2000, step_tokens=64, stages=1):
    return Machine("toy", COST, 1, tokens, 1000, rows, step_tokens, overlap, stages)


def serve_alone(spec, jobs):
    """One replica, driven by nothing but arrivals; token times by job."""
    replica, coming, times = Replica(0, spec), list(jobs), {}
    while coming or replica.wake is not None:
        if coming and (replica.wake is None or coming[0].arrival <= replica.wake):
            job = coming.pop(0)
            replica.submit(job, job.arrival)
        else:
            for job in replica.drive():
                times[job.number] = job.times
    replica.scheduler.check_integrity()
    return times, replica


def make_jobs(rows):
    at, jobs = 0.0, []
    for number, (gap, prompt, output, shared) in enumerate(rows):
        at += gap
        tokens = [7] * min(shared, prompt) + [100 + number] * (prompt - min(shared, prompt))
        jobs.append(SimulatedJob(number, at, tokens, prompt, output))
    return jobs


ROWS = st.lists(
    st.tuples(st.floats(0, 0.3), st.integers(1, 150), st.integers(1, 60), st.integers(0, 120)), min_size=1, max_size=25
)


LINK = HostMemory(bytes=10**9, bandwidth=1e9)  # blocks of 16,000 bytes


def conversations(users, turns, gap=3.0):
    """Everybody comes again with all that was said, which is more than the device holds."""
    jobs = []
    for turn in range(turns):
        for user in range(users):
            tokens = [100 * user + 7] * (60 + 80 * turn)
            jobs.append(SimulatedJob(len(jobs), gap * turn + 0.01 * user, tokens, len(tokens), 12))
    return jobs


def cached_of(memory, users=12, turns=4, **changes):
    spec = ReplicaSpec(machine(True, tokens=1600), host_memory=memory, **changes)
    jobs = conversations(users, turns)
    times, replica = serve_alone(spec, jobs)
    assert all(len(times[job.number]) == job.output for job in jobs)
    return sum(job.cached for job in jobs), replica


def test_host_memory_holds_what_the_device_gave_up():
    """Every turn but the first finds the one before; a link that is slower than computing is left alone."""
    without, _ = cached_of(None)
    found, replica = cached_of(LINK)
    (tier,) = replica.scheduler.kv.transfers.tiers
    possible = sum((60 + 80 * turn) // 16 * 16 for turn in range(3)) * 12
    assert found >= 0.95 * possible > 3 * without
    assert tier.stats.read > 0 and tier.bandwidth == pytest.approx(LINK.bandwidth)
    slow, replica = cached_of(replace(LINK, bandwidth=2e6))
    (tier,) = replica.scheduler.kv.transfers.tiers
    assert tier.stats.spared > 0 and slow < 0.3 * possible


def test_a_small_host_memory_holds_less():
    found = [cached_of(replace(LINK, bytes=16_000 * blocks))[0] for blocks in (1, 120, 1000)]
    assert found[0] < found[1] < found[2]


def test_a_replica_that_dies_loses_its_host_memory():
    _, replica = cached_of(LINK)
    assert len(replica._host.slots) > 50
    replica.die(replica.now)
    assert len(replica._host.slots) == 0 and replica.scheduler.kv.transfers.tiers[0].transport is replica._host


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, overlap=st.booleans(), size=st.integers(1, 200), slow=st.booleans())
def test_nothing_is_lost_whatever_the_host_memory_holds(rows, overlap, size, slow):
    memory = HostMemory(16_000 * size, 1e6 if slow else 1e9)
    jobs = make_jobs(rows)
    times, replica = serve_alone(ReplicaSpec(machine(overlap, tokens=400), host_memory=memory), jobs)
    assert {number: len(one) for number, one in times.items()} == {job.number: job.output for job in jobs}
    assert all(one == sorted(one) for one in times.values())
    replica._host.slots.check()


@settings(max_examples=150, deadline=None)
@example([(0.0, 141, 44, 0), (0.15625, 56, 12, 0)], True, False, 256)  # preempted, and its last chunk has no token
@given(rows=ROWS, overlap=st.booleans(), caching=st.booleans(), tokens=st.sampled_from([256, 2000]))
def test_leaps_change_no_moment(rows, overlap, caching, tokens):
    spec = ReplicaSpec(machine(overlap, tokens=tokens), block_size=8, policy=Fcfs, prefix_caching=caching)
    with_leaps, fast = serve_alone(spec, make_jobs(rows))
    without, slow = serve_alone(replace(spec, leaps=False), make_jobs(rows))
    assert with_leaps.keys() == without.keys() == set(range(len(rows)))
    for number, times in without.items():
        assert with_leaps[number] == pytest.approx(times, abs=1e-9)
    assert fast.scheduler.stats == slow.scheduler.stats
    assert fast.busy == pytest.approx(slow.busy)
    assert fast.scheduler.kv.stats == slow.scheduler.kv.stats


def test_leaps_are_taken():
    """Else the test above compares a thing with itself."""
    spec = ReplicaSpec(machine(True), block_size=8, policy=Fcfs)
    turns = {}
    for leaps in (True, False):
        replica = Replica(0, replace(spec, leaps=leaps))
        for job in make_jobs([(0, 20, 300, 0), (0, 20, 400, 0)]):
            replica.submit(job, 0.0)
        turns[leaps] = 0
        while replica.wake is not None:
            replica.drive()
            turns[leaps] += 1
    assert turns[True] < 20 < 390 < turns[False]


class Ending(SimulatedRunner):
    """Says stop when the answer has its length, and never before."""

    def _sample(self, step, index, row, hashes, result):
        held = super()._sample(step, index, row, hashes, result)
        request = step.requests[index]
        if not held:
            return []
        ends = step.starts[index] + step.counts[index] + 1 - request.prompt_len >= self.ends[request.id]
        row.tokens[-1] = STOP if ends else max(held[0], STOP + 1)
        return row.tokens[-1:]


@settings(max_examples=40, deadline=None)
@example([(0.0, 1, 1, 0), (0.0, 106, 10, 1)], False, 2)  # the runner itself samples STOP in the middle
@given(rows=ROWS, overlap=st.booleans(), stages=st.sampled_from([1, 1, 2, 4]))
def test_replica_keeps_the_times_of_the_engine(rows, overlap, stages):
    """The engine's own loop over the runner that keeps a shadow of memory says the same, token for token."""
    spec = ReplicaSpec(machine(overlap, stages=stages), block_size=8, policy=Fcfs)
    expected, _ = serve_alone(spec, make_jobs(rows))
    clock = SimulatedClock()
    ends = {str(job.number): job.output for job in make_jobs(rows)}
    runner = Ending(250, 8, clock, vocab=1000, step_time=COST, stages=[1 / stages] * stages)
    runner.ends = ends
    scheduler = Scheduler(Limits(8, 64, stages=stages), KVManager(250, 8), Fcfs())
    engine = Engine(scheduler, runner, overlap=overlap, clock=clock)
    coming, requests = make_jobs(rows), []
    while coming or engine.has_work:
        if not engine.has_work:
            clock.wait_until(coming[0].arrival)
        while coming and coming[0].arrival <= clock.now:
            job = coming.pop(0)
            one = Request(
                str(job.number),
                job.tokens,
                PARAMS,
                max_tokens=1000,
                seed=0,
                stop_ids=frozenset((STOP,)),
                arrival=job.arrival,
            )
            requests.append(one)
            engine.add(one)
        engine.step()
    for request in requests:
        assert request.metrics.token_times == pytest.approx(expected[int(request.id)], abs=1e-9)


def test_a_death_keeps_what_was_sent_and_nothing_later():
    spec = ReplicaSpec(machine(True), block_size=8, policy=Fcfs)
    replica = Replica(0, spec)
    for job in make_jobs([(0, 40, 50, 0), (0, 10, 80, 0)]):
        replica.submit(job, 0.0)
    at = 0.2
    while replica.wake is not None and replica.wake < at:
        replica.drive()
    lost = replica.die(at)
    assert {job.number for job in lost} == {0, 1} and replica.outstanding == 0 and replica.wake is None
    for job in lost:
        assert 0 < len(job.times) < job.output and max(job.times) < at
        assert len(job.tokens) == job.prompt + len(job.times)
    again = Replica(1, spec)
    for job in lost:
        again.submit(job, at)
    done = []
    while again.wake is not None:
        done += again.drive()
    for job in done:
        assert len(job.times) == job.output and sorted(job.times) == job.times
        assert len(job.tokens) == job.prompt + job.output


def test_facts_count_every_pair():
    spec = ReplicaSpec(machine(False, step_tokens=16), block_size=8, policy=Fcfs, leaps=False)
    seen = []

    class Spy(LinearStepTime):
        def seconds(self, facts):
            seen.append(facts[:4])
            return super().seconds(facts)

    spec = replace(spec, machine=replace(spec.machine, step_time=Spy(1e-3, 0, 0, 0, 0)))
    serve_alone(spec, make_jobs([(0, 20, 3, 0)]))
    assert seen == [(0, 0, 16, 16 * 17 // 2), (0, 0, 4, 17 + 18 + 19 + 20), (1, 21, 0, 0), (1, 22, 0, 0)]


def test_too_long_for_a_replica_is_refused_and_the_rest_served():
    work = Workload("w", (0.0, 0.1, 0.2), (50, 5000, 60), (5, 5, 5))
    outcome = simulate(ClusterSpec(ReplicaSpec(machine(False), block_size=8, policy=Fcfs)), work)
    assert outcome.refused == 1 and sorted(one.prompt for one in outcome.served) == [50, 60]
