"""What is lost with a rank: nothing that was computed is found again, nobody is blamed at once, everybody goes on."""

from __future__ import annotations

from harness import Day, House
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_clients import CALM, clients

from tokenmill.engine.core import Engine
from tokenmill.engine.request import API, BATCH, REALTIME, Finish, Request
from tokenmill.engine.runner.simulated import Faults, SimulatedRunner
from tokenmill.engine.scheduler.isolation import RANK_CRASHED, RANK_LOST_IDLE
from tokenmill.engine.step import Loss, Pending, Step
from tokenmill.errors import StepFailed
from tokenmill.params import SamplingParams


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overlap=st.booleans(),
    caching=st.booleans(),
    lost=st.sampled_from([0.02, 0.1, 0.3]),
    drafts=st.sampled_from([0.0, 0.5]),
)
def test_no_token_changes_and_nothing_leaks(
    seed: int, overlap: bool, caching: bool, lost: float, drafts: float
) -> None:
    faults = Faults(lose_memory=lost, min_gap=4, seed=seed)
    engine = House(rows=8, step_tokens=64, blocks=60, overlap=overlap, prefix_caching=caching).build(faults)
    Day(engine, seed=seed, drafts=drafts, integrity=0.3).run(clients(seed, 20, CALM))  # which judges all of them


def ask(engine: Engine, id: str, prompt: list[int], max_tokens: int = 30, priority: int = API) -> Request:
    params = SamplingParams(temperature=0)
    request = Request(id, prompt, params, max_tokens=max_tokens, seed=0, priority=priority)
    engine.add(request)
    return request


def test_nobody_starts_on_what_was_computed_before_the_loss() -> None:
    engine = House(block_size=8).build()
    prompt = list(range(2, 60))
    first = ask(engine, "first", prompt, max_tokens=1)
    while not first.finished:
        engine.step()
    runner = engine.runner
    assert isinstance(runner, SimulatedRunner)
    runner.faults.lose_memory = 1.0
    second = ask(engine, "second", prompt)
    engine.step()
    engine.step()
    runner.faults.lose_memory = 0.0
    assert engine.scheduler.stats.failed_steps == 1 and second.metrics.cached_tokens > 0
    assert not engine.scheduler.kv.index.blocks() and not engine.scheduler.running
    while not second.finished:
        engine.step()
        engine.scheduler.check_integrity()
    assert second.finish is Finish.LENGTH


def test_who_runs_but_was_not_in_the_lost_step_starts_over_too_and_is_not_blamed() -> None:
    """A prompt of a higher class takes all of a step: who reads a lower one has to wait, with its row and blocks."""
    engine = House(rows=4, step_tokens=8, blocks=200, overlap=False).build()
    runner = engine.runner
    assert isinstance(runner, SimulatedRunner)
    low = ask(engine, "low", list(range(2, 30)), max_tokens=4, priority=BATCH)
    engine.step()
    high = ask(engine, "high", list(range(40, 70)), max_tokens=4, priority=REALTIME)
    runner.faults.lose_memory = 1.0
    engine.step()
    runner.faults.lose_memory = 0.0
    assert high.last_step == 2 and low.last_step == 1 and low.metrics.preemptions == 1
    assert all(request.row < 0 and not request.blocks for request in (low, high))
    assert engine.scheduler.isolation.cases.keys() == {"high"}
    while engine.has_work:
        engine.step()
    assert low.finish is high.finish is Finish.LENGTH
    engine.scheduler.check_integrity()


class RankKiller(SimulatedRunner):
    """A rank dies of every step that holds a certain request."""

    killed = 0

    def launch(self, step: Step) -> Pending:
        if any(request.id == "killer" for request in step.requests):
            self.killed += 1
            self._lost = True
            raise StepFailed("rank 1 was killed by SIGSEGV")
        return super().launch(step)


def test_a_request_that_kills_ranks_is_found_and_all_others_are_answered() -> None:
    engine = House(rows=8, step_tokens=64, blocks=100).build()
    old = engine.runner
    assert isinstance(old, SimulatedRunner)
    engine.runner = runner = RankKiller(100, 8, old.clock, vocab=old.vocab)
    others = [ask(engine, str(number), [5, 6, number], max_tokens=20) for number in range(6)]
    killer = ask(engine, "killer", [9, 9, 9])
    while engine.has_work:
        engine.step()
    assert killer.finish is Finish.ERROR and killer.error is not None
    assert killer.error == "this request failed 6 times, the last ones alone: StepFailed: rank 1 was killed by SIGSEGV"
    assert runner.killed == 6, "three times in company, then three times alone"
    assert {other.finish for other in others} == {Finish.LENGTH}
    engine.scheduler.check_integrity()


def test_two_losses_in_a_row_isolate_nobody() -> None:
    engine = House(rows=8, step_tokens=64, blocks=100, overlap=False).build()
    scheduler = engine.scheduler
    requests = [ask(engine, str(number), [5, 6, number], max_tokens=20) for number in range(6)]
    for now in range(2):
        step = scheduler.schedule(float(now))
        assert step is not None
        scheduler.fail([step], "a rank was lost", float(now), Loss(RANK_CRASHED))
    assert not scheduler.isolation.suspects
    step = scheduler.schedule(2.0)
    assert step is not None
    scheduler.fail([step], "a step failed", 2.0)
    assert len(scheduler.isolation.suspects) == len(requests), "a third failure is one too many"
    while engine.has_work:
        engine.step()
    assert {request.finish for request in requests} == {Finish.LENGTH}


def test_a_loss_between_steps_has_to_do_with_nobody() -> None:
    engine = House(rows=8, step_tokens=64, blocks=100, overlap=False).build()
    scheduler = engine.scheduler
    request = ask(engine, "only", [5, 6, 7])
    for now in range(20):
        step = scheduler.schedule(float(now))
        assert step is not None
        scheduler.fail([step], "a rank was lost", float(now), Loss(RANK_LOST_IDLE))
    assert not scheduler.isolation.suspects and scheduler.isolation.failures(request) == 0
    while engine.has_work:
        engine.step()
    assert request.finish is Finish.LENGTH
    assert not scheduler.isolation.cases
