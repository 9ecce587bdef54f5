"""Many replicas: nobody is lost, routers do what they say, splits, failures and autoscaling cost what they must."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine.scheduler.policy import Fcfs, ShortestFirst
from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.simulator.autoscale import Autoscale
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.faults import Failures
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.router import ROUTERS
from tokenmill.plan.simulator.simulate import crowd, prompt_tokens, simulate
from tokenmill.step_time import LinearStepTime

COST = LinearStepTime(5e-3, 1e-4, 1e-7, 5e-5, 1e-9)
TOY = Machine("toy", COST, 1, 40_000, 1000, 16, 512, True)
SLO = Slo(1.0, 0.05)


def load(count, rate, seed=0, shared=0):
    """Requests that share a beginning with some others: one of `shared` documents of 1024 tokens."""
    source, at = random.Random(seed), 0.0
    arrivals, prompts, outputs, ids = [], [], [], []
    for number in range(count):
        arrivals.append(at)
        at += source.expovariate(rate)
        document = source.randrange(shared) if shared else 0
        prompts.append(1024 + source.randrange(1, 200) if shared else source.randrange(20, 600))
        outputs.append(source.randrange(1, 80))
        ids.append((2 * document, 2 * document + 1, 10_000 + number))
    return Workload("toy", tuple(arrivals), tuple(prompts), tuple(outputs), tuple(ids) if shared else None)


def spec(**changes):
    return ClusterSpec(ReplicaSpec(TOY, block_size=32, policy=Fcfs), **{"replicas": 4, **changes})


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(5, 200),
    router=st.sampled_from(sorted(ROUTERS)),
    prefill=st.integers(0, 3),
    mean=st.sampled_from([None, 1.0, 5.0]),
    scaled=st.booleans(),
    policy=st.sampled_from([Fcfs, ShortestFirst]),
)
def test_everybody_is_served_once_whatever_happens(seed, rate, router, prefill, mean, scaled, policy):
    work = load(60, rate, seed, shared=5)
    house = spec(
        router=router,
        prefill=prefill,
        failures=None if mean is None else Failures(mean, 0.5, seed),
        autoscale=Autoscale(2, 8, 4.0, interval=0.2, startup=0.5) if scaled and not prefill and not mean else None,
    )
    outcome = simulate(replace(house, replica=replace(house.replica, policy=policy)), work)
    assert sorted((one.prompt, one.output) for one in outcome.served) == sorted(zip(work.prompts, work.outputs))
    assert all(0 < one.ttft <= one.latency for one in outcome.served)
    assert 0 < outcome.busy_seconds <= outcome.replica_seconds * 1.001 or mean is not None
    assert outcome.goodput(SLO) <= len(work) / outcome.seconds


def test_the_prefix_router_finds_what_others_spread():
    """A hundred documents fit into four memories, not into each of them."""
    work = load(800, 20, shared=100)
    share = {name: simulate(spec(router=name), work).figures(SLO)["cached_share"] for name in ROUTERS}
    assert share["prefix-aware"] > 1.15 * max(share["random"], share["round-robin"], share["least-loaded"])


def test_the_prefix_router_leaves_a_long_queue():
    """All ask about one document: it must not pile up on one replica."""
    work = load(300, 120, shared=1)
    aware, least = (simulate(spec(router=name), work).figures(SLO) for name in ("prefix-aware", "least-loaded"))
    assert aware["latency_mean"] < 1.5 * least["latency_mean"]


def test_least_loaded_beats_random():
    work = load(400, 60)
    mean = {name: simulate(spec(router=name), work).figures(SLO)["ttft_mean"] for name in ("random", "least-loaded")}
    assert mean["least-loaded"] < mean["random"]


def test_a_split_moves_memory_and_spares_decoding_from_prompts():
    work = load(300, 30)
    together, split = simulate(spec(), work), simulate(spec(prefill=2, link_bytes=1e9), work)
    several = [one for one in zip(work.prompts, work.outputs) if one[1] > 1]
    assert split.transferred == sum(1000 * (prompt + 1) for prompt, _ in several)
    assert split.gap(0.99) < together.gap(0.99)  # no prompt stands between two tokens


def test_a_slow_link_is_felt():
    work = load(100, 20)
    fast, slow = (simulate(spec(prefill=2, link_bytes=bytes), work) for bytes in (1e9, 1e6))
    assert slow.figures(SLO)["latency_mean"] > fast.figures(SLO)["latency_mean"] + 0.1


def test_failures_cost_and_are_survived():
    work = load(300, 40)
    calm = simulate(spec(), work)
    stormy = simulate(spec(failures=Failures(3.0, 1.0, 1)), work)
    assert stormy.failures > 3 and stormy.moved > 0 and len(stormy.served) == len(work)
    assert stormy.figures(SLO)["latency_mean"] > calm.figures(SLO)["latency_mean"]


def test_steps_of_replicas_that_failed_are_counted():
    """With one row each, every token of an answer is a step of its own."""
    work = load(80, 10)
    one = replace(spec(), replica=ReplicaSpec(TOY, block_size=32, policy=Fcfs).with_limits(rows=1))
    stormy = simulate(replace(one, failures=Failures(2.0, 0.5, 1)), work)
    assert stormy.failures > 3 and stormy.steps > sum(work.outputs)


def test_what_a_failed_replica_had_learned_counts():
    """A lone replica that fails between the last two requests has learned from all answers before."""
    early = load(40, 20)
    work = replace(early, arrivals=(*early.arrivals[:-1], early.arrivals[-1] + 60.0))
    one = replace(spec(replicas=1), replica=ReplicaSpec(TOY, block_size=32, policy=ShortestFirst))

    class Once(Failures):
        def schedule(self, replicas, horizon):
            yield horizon - 1.0, 0

    calm, stormy = (simulate(replace(one, failures=found), work) for found in (None, Once(1.0, 0.5)))
    assert stormy.failures == 1 and stormy.coverage == pytest.approx(calm.coverage, abs=0.05)


def test_autoscaling_follows_the_load_and_saves_machines():
    quiet, rush = load(60, 4), load(400, 60, seed=1)
    arrivals = (*quiet.arrivals, *(quiet.seconds + at for at in rush.arrivals))
    arrivals += tuple(arrivals[-1] + 1 + at for at in quiet.arrivals)
    work = Workload(
        "day",
        arrivals,
        quiet.prompts + rush.prompts + quiet.prompts,
        quiet.outputs + rush.outputs + quiet.outputs,
    )
    scale = Autoscale(1, 8, 6.0, interval=0.5, startup=1.0)
    scaled = simulate(spec(replicas=1, autoscale=scale), work)
    fixed = simulate(spec(replicas=8), work)
    sizes = [count for _, count in scaled.scale]
    assert sizes[0] == 1 and max(sizes) >= 4 and sizes[-1] < max(sizes)
    assert scaled.replica_seconds < 0.8 * fixed.replica_seconds


def test_shrinking_waits_for_calm():
    scale = Autoscale(1, 10, 10.0, patience=3)
    assert scale.wanted(95, 4, calm=2) == (10, 0)
    assert scale.wanted(5, 10, calm=0) == (10, 1)
    assert scale.wanted(5, 10, calm=2) == (9, 0)
    assert scale.wanted(5, 1, calm=2) == (1, 0)


def test_prompts_are_equal_where_the_trace_says_so():
    work = Workload("w", (0.0, 1.0, 2.0), (1300, 1100, 700), (1, 1, 1), ((1, 2, 3), (1, 2, 9), (4, 2)))
    first, second, third = (prompt_tokens(work, number) for number in range(3))
    assert [len(one) for one in (first, second, third)] == [1300, 1100, 700]
    assert first[:1024] == second[:1024] and first[1024] != second[1024] and first[:512] != third[:512]


def test_a_crowd_is_so_many_services():
    one = load(400, 2.0, shared=3)
    many = crowd(one, 40.0, 30.0)
    assert many.seconds <= 30.0 and many.rate == pytest.approx(40, rel=0.15)
    firsts = {ids[0] for ids in many.hash_ids}
    assert len(firsts) > 3 * 5  # copies do not share documents
