"""Days of beams, forks, proposals and faults under every pace, policy and way of batching: the same tokens, no hang."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from harness import Day
from sim_answer import VOCAB
from sim_clients import CALM, POISON, ROUGH, clients

from tokenmill.engine.core import Engine
from tokenmill.engine.request import API, BATCH, REALTIME, Request
from tokenmill.engine.runner.simulated import Faults, SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.batching import BATCHING
from tokenmill.engine.scheduler.control import Pace, pace_for
from tokenmill.engine.scheduler.policy import POLICIES
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "paced": {"itl_ms": 1.0},
    "paced, shortest first": {"itl_ms": 3.0, "ttft_ms": 10.0, "policy": "sjf"},
    "shortest first, reserved": {"policy": "sjf", "reserved_tokens": 128},
    "whole prompts": {"whole_prompts": True},
    "no cache": {"kv_cache": False},
    "no cache, whole prompts": {"kv_cache": False, "whole_prompts": True},
    "dynamic": {"batching": "dynamic"},
    "dynamic, paced": {"batching": "dynamic", "policy": "sjf", "itl_ms": 3.0},
    "static": {"batching": "static"},
    "static, whole prompts": {"batching": "static", "whole_prompts": True, "policy": "sjf"},
    "static, no cache": {"batching": "static", "kv_cache": False, "whole_prompts": True},
}


def engine_of(seed: int, way: dict[str, Any], faults: Faults | None, stages: int = 1) -> Engine:
    way, dice, clock = dict(way), random.Random(seed), SimulatedClock()
    policy = POLICIES[way.pop("policy", "priority")]()
    batching = BATCHING[way.pop("batching", "continuous")](kv_cache=way.pop("kv_cache", True))
    itl, ttft = way.pop("itl_ms", None), way.pop("ttft_ms", None)
    limits = Limits(dice.choice([2, 8, 16]), dice.choice([128, 256]), stages=stages, **way)
    kv = KVManager(dice.choice([100, 160, 400]), 8, batching.may_share)
    runner = SimulatedRunner(kv.pool.num_blocks, 8, clock, vocab=VOCAB, faults=faults, stages=[1 / stages] * stages)
    scheduler = Scheduler(limits, kv, policy, pace=pace_for(limits, itl, ttft), batching=batching)
    return Engine(scheduler, runner, overlap=seed % 3 > 0, clock=clock)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", WAYS)
def test_every_way_gives_everybody_the_tokens_they_get_alone(name: str, seed: int) -> None:
    faults = Faults(fail_at_launch=0.01, fail_at_wait=0.02, min_gap=10, poisoned_tokens=POISON, seed=seed)
    rough = seed % 2 == 1
    day = Day(engine_of(seed, WAYS[name], faults if rough else None), seed=seed, drafts=0.2 * (seed % 3 == 2))
    mix = replace(ROUGH if rough else CALM, burst=40, beams=0.08, several=0.1, prompt_logprobs=0.1)
    day.run(clients(seed, 100, mix))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_gives_them_in_stages(name: str, stages: int) -> None:
    faults = Faults(fail_at_launch=0.01, fail_at_wait=0.02, min_gap=10, poisoned_tokens=POISON, seed=stages)
    day = Day(engine_of(stages, WAYS[name], faults, stages), seed=stages, drafts=0.2 * (stages == 3))
    day.run(clients(stages, 100, replace(ROUGH, burst=40, beams=0.08, several=0.1, prompt_logprobs=0.1)))


def test_a_pace_that_lets_nobody_in_lets_the_more_important_change_places() -> None:
    limits = Limits(4, 64)
    scheduler = Scheduler(limits, KVManager(64, 8), pace=Pace(limits))
    engine = Engine(scheduler, SimulatedRunner(64, 8, clock := SimulatedClock()), overlap=False, clock=clock)
    params = SamplingParams(temperature=0, max_tokens=50)
    for number, priority in enumerate((API, BATCH)):
        engine.add(Request(f"r{number}", [number + 1] * 5, params, max_tokens=50, seed=1, priority=priority))
    for _ in range(3):
        engine.step()
    scheduler.pace.rows = 2
    engine.add(Request("now", [9] * 5, params, max_tokens=50, seed=1, priority=REALTIME, arrival=clock.now))
    for _ in range(3):
        engine.step()
    assert [request.id for request in scheduler.running] == ["now", "r0"]
