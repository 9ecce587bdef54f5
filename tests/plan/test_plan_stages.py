"""What the planner expects of a pipeline is what the real scheduler does in its stages."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import plan_models
import pytest

from tokenmill.plan.demand.slo import NO_PROMISE
from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.planner.candidates import GpuFleet
from tokenmill.plan.planner.queueing import demand_of, estimate
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import simulate
from tokenmill.plan.solve.gpus import GPUS
from tokenmill.plan.solve.shape import Split

COUNT, PROMPT, ANSWER = 120, 1024, 128


@pytest.mark.parametrize(("stages", "rate"), [(2, 0.5), (2, 4.0), (4, 4.0)])
def test_the_pace_of_a_pipeline_is_predicted_within_15_percent(stages: int, rate: float) -> None:
    shape, fleet = plan_models.shape("llama3-70b"), GpuFleet(GPUS["h200"], stages)
    layout = next(one for one in fleet.layouts(shape, 0) if one.split == Split(pipeline=stages))
    placed = fleet.place(shape, layout, longest=PROMPT + ANSWER, rows=256, step_tokens=2048)
    source, now, arrivals = random.Random(1), 0.0, []
    for _ in range(COUNT):
        now -= math.log(1 - source.random()) / rate
        arrivals.append(now)
    work = Workload("poisson", tuple(arrivals), (PROMPT,) * COUNT, (ANSWER,) * COUNT)
    demand = replace(demand_of(work, 0.9), rate=rate, burstiness=1.0)
    expected = estimate(placed.step_time, demand, placed.room, 0.9)
    machine = Machine("pipeline", placed.step_time, stages, placed.room.kv_tokens, 1, 256, 2048, True, stages)
    seen = simulate(ClusterSpec(ReplicaSpec(machine, prefix_caching=False)), work)
    figures = seen.figures(NO_PROMISE)
    first, whole = figures["ttft_mean"], figures["latency_mean"]
    assert expected.itl == pytest.approx((whole - first) / (ANSWER - 1), rel=0.15)
    assert expected.ttft == pytest.approx(first, rel=0.35)  # it does not know that chunks of a prompt follow each other
