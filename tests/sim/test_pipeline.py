"""Steps in flight: stages have one each, by the formula; sets are disjoint and even; nobody is left out."""

from __future__ import annotations

import pytest
from harness import Day, House
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_clients import POISON, ROUGH, clients

from tokenmill.engine.core import Engine
from tokenmill.engine.request import Finish, Request
from tokenmill.engine.runner.simulated import Faults, SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.stages import LEAST_CHUNK
from tokenmill.engine.step import Step
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams
from tokenmill.step_time import Facts


class PerStep:
    """Every step takes a second."""

    def seconds(self, facts: Facts) -> float:
        return 1.0


class PerToken:
    def seconds(self, facts: Facts) -> float:
        return float(facts.tokens)


def engine_of(stages: int, rows: int = 64, step_tokens: int = 256, step_time=None, shares=None) -> Engine:
    clock = SimulatedClock()
    runner = SimulatedRunner(2000, 8, clock, step_time=step_time or PerStep(), stages=shares or [1 / stages] * stages)
    limits = Limits(rows, step_tokens, stages=stages)
    return Engine(Scheduler(limits, KVManager(2000, 8, False)), runner, overlap=False, clock=clock)


def request(name: str, prompt: int, output: int, arrival: float = 0.0) -> Request:
    params = SamplingParams(temperature=0, max_tokens=output)
    return Request(name, [ord(name[0])] * prompt, params, max_tokens=output, seed=1, arrival=arrival)


def watched(engine: Engine) -> list[Step]:
    """The steps that it launches from now on."""
    seen, launch = [], engine.runner.launch

    def note(step: Step):
        seen.append(step)
        return launch(step)

    engine.runner.launch = note
    return seen


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert not engine.runner.violations


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batches", [1, 2, 4, 16])
def test_every_stage_is_as_busy_as_the_formula_of_the_bubble_says(stages, batches):
    engine = engine_of(stages, step_tokens=LEAST_CHUNK, rows=8)
    for number in range(batches):
        engine.add(request(chr(65 + number), LEAST_CHUNK, 1))
    run(engine)
    assert engine.scheduler.stats.steps == batches
    for busy in engine.runner.busy:
        assert busy / engine.clock.now == pytest.approx(batches / (batches + stages - 1))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_decoding_keeps_every_stage_busy_if_there_are_as_many_rows(stages):
    used = {}
    for rows in (1, stages, 5 * stages + 1):
        engine = engine_of(stages)
        for number in range(rows):
            engine.add(request(chr(65 + number), 4, 400))
        run(engine)
        used[rows] = [busy / engine.clock.now for busy in engine.runner.busy]
    assert used[1] == pytest.approx([1 / stages] * stages)
    assert min(used[stages] + used[5 * stages + 1]) > 0.97


def test_the_slowest_stage_sets_the_pace():
    engine = engine_of(3, shares=[0.2, 0.5, 0.3])
    for number in range(6):
        engine.add(request(chr(65 + number), 4, 200))
    run(engine)
    first, second, third = (busy / engine.clock.now for busy in engine.runner.busy)
    assert second > 0.97 and first == pytest.approx(0.4 * second) and third == pytest.approx(0.6 * second)


@pytest.mark.parametrize("stages", [2, 4])
def test_chunks_of_one_long_prompt_follow_each_other_through_the_stages(stages):
    engine = engine_of(stages, step_tokens=4096, step_time=PerToken())
    engine.add(request("a", 4096, 1))
    run(engine)
    assert 1 / stages < engine.clock.now / 4096 < 1.5 / stages


@settings(max_examples=60, deadline=None)
@given(
    stages=st.sampled_from([2, 3, 4]),
    lengths=st.lists(st.integers(5, 60), min_size=1, max_size=24),
    gap=st.sampled_from([0.0, 0.3, 2.0]),
)
def test_sets_are_even_and_nobody_is_left_out(stages, lengths, gap):
    engine = engine_of(stages, rows=32)
    steps = watched(engine)
    coming = [request(chr(65 + n), 3, length, n * gap) for n, length in enumerate(lengths)]
    born = {}  # request -> the step that ended its prompt
    while coming or engine.has_work:
        if not engine.has_work:
            engine.clock.wait_until(coming[0].arrival)
        while coming and coming[0].arrival <= engine.clock.now:
            engine.add(coming.pop(0))
        engine.step()
    alive = [0] * (len(steps) + 1)  # rows by step
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        for one in step.requests:
            born.setdefault(one.id, number)
            assert number - last.get(one.id, number) <= 2 * stages, f"{one} waited"
            assert last.get(one.id, -stages) <= number - 1
            last[one.id] = number
    for name, number in born.items():
        for at in range(number, last[name] + 1):
            alive[at] += 1
    settled = range(max(born.values()) + 2 * stages, len(steps))  # nobody comes any more
    assert all(len(steps[at].rows) <= -(-alive[at - stages] // stages) for at in settled)


@pytest.mark.parametrize("stages", [2, 4])
def test_faulty_days_in_stages(stages):
    faults = Faults(0.01, 0.02, lose_memory=0.003, slow=0.02, min_gap=10, poisoned_tokens=POISON, seed=stages)
    house = House(rows=16, step_tokens=128, blocks=120, stages=stages, max_queued_requests=100)
    day = Day(house.build(faults), seed=stages, drafts=0.1, storm=0.001, integrity=0.02)
    day.run(clients(stages, 1500, ROUGH))
    finishes = {request.finish for request in day.ends.values()}
    assert finishes == {Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR}
    assert day.scheduler.stats.failed_steps > 10 and day.scheduler.stats.preemptions > 20
