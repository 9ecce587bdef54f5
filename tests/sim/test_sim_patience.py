"""The next step is scheduled no earlier than it must be: whoever comes while a long step runs is in the next one."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest

from tokenmill.engine.core import PATIENCE_SLICE, Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner.simulated import Faults, SimulatedClock, SimulatedRunner, linear_cost
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.step import Step
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def serve(
    patient: bool, rate: float, seed: int, slow: float = 0.0, cost: Callable[[Step], float] | None = None
) -> tuple[list[float], float]:
    """First-token times of requests that come at random moments, and when the last of them ended."""
    dice, clock = random.Random(seed), SimulatedClock()
    blocks = 16384
    runner = SimulatedRunner(blocks, 16, clock, cost=cost, faults=Faults(slow=slow, slow_factor=3, seed=seed))
    engine = Engine(Scheduler(Limits(128, 8192), KVManager(blocks, 16, False)), runner, overlap=True, clock=clock)
    moments: list[float] = []
    for _ in range(120):
        moments.append((moments[-1] if moments else 0.0) + dice.expovariate(rate))
    requests: list[Request] = []
    while len(requests) < len(moments) or engine.has_work:
        if not engine.has_work:
            clock.wait_until(moments[len(requests)])
        while patient and (left := engine.patience()) > 0:
            clock.wait_until(clock.now + min(left, PATIENCE_SLICE))
        while len(requests) < len(moments) and moments[len(requests)] <= clock.now:
            number, prompt = len(requests), [dice.randrange(900) for _ in range(dice.randrange(512, 1536))]
            request = Request(str(number), prompt, PARAMS, max_tokens=32, seed=number, arrival=moments[number])
            requests.append(request)
            engine.add(request)
        engine.step()
    assert not runner.violations
    return [request.metrics.token_times[0] - request.arrival for request in requests], clock.now


@pytest.mark.parametrize(("rate", "share"), [(35, 0.96), (45, 0.94)])
def test_first_tokens_come_sooner_and_nothing_ends_later(rate: float, share: float) -> None:
    sooner, ends = [], []
    for seed in range(4):
        plain, plain_end = serve(False, rate, seed)
        patient, patient_end = serve(True, rate, seed)
        sooner.append(mean(patient) / mean(plain))
        ends.append(patient_end / plain_end)
    assert mean(sooner) < share
    assert max(ends) < 1.01


def test_steps_that_take_longer_than_foreseen_cost_nothing() -> None:
    """Slow steps hit other steps where there are others, so it takes several seeds to compare."""
    ends = [serve(True, 30, seed, slow=0.1)[1] / serve(False, 30, seed, slow=0.1)[1] for seed in range(8)]
    assert mean(ends) < 1.02


def test_long_steps_that_short_ones_do_not_foretell_leave_the_device_no_time_to_rest() -> None:
    """Up to a thousand tokens a step takes the time of its launches: by those, long ones would seem to take ages."""

    def cost(step: Step) -> float:
        return max(0.03, 2e-5 * step.num_tokens) if step.num_tokens > len(step.rows) else 0.003

    ends = [serve(True, 30, seed, cost=cost)[1] / serve(False, 30, seed, cost=cost)[1] for seed in range(6)]
    assert mean(ends) < 1.02


def test_short_steps_are_not_waited_for() -> None:
    clock = SimulatedClock()
    runner = SimulatedRunner(64, 16, clock, cost=linear_cost(base=0.004))
    engine = Engine(Scheduler(Limits(4, 64), KVManager(64, 16, False)), runner, overlap=True, clock=clock)
    engine.add(Request("1", [5] * 8, PARAMS, max_tokens=32, seed=0))
    while engine.has_work:
        assert engine.patience() == 0.0
        engine.step()


def test_an_engine_without_overlap_never_waits() -> None:
    clock = SimulatedClock()
    runner = SimulatedRunner(1024, 16, clock, cost=linear_cost(base=0.1))
    engine = Engine(Scheduler(Limits(4, 512), KVManager(1024, 16, False)), runner, overlap=False, clock=clock)
    engine.add(Request("1", [5] * 800, PARAMS, max_tokens=32, seed=0))
    while engine.has_work:
        engine.step()
        assert engine.patience() == 0.0
