"""Groups of ranks with requests of their own: placed where they start first, blamed alone, and no token changes."""

from __future__ import annotations

from harness import Day, House
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_clients import CALM, POISON, ROUGH, clients

from tokenmill.engine.core import Engine
from tokenmill.engine.request import Finish, Request
from tokenmill.engine.runner.simulated import Faults
from tokenmill.engine.scheduler import Scheduler
from tokenmill.params import SamplingParams


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(2, 4),
    overlap=st.booleans(),
    caching=st.booleans(),
    fails=st.sampled_from([0.0, 0.1]),
    lost=st.sampled_from([0.0, 0.1]),
)
def test_no_token_changes_and_nothing_leaks(
    seed: int, groups: int, overlap: bool, caching: bool, fails: float, lost: float
) -> None:
    house = House(rows=6, step_tokens=48, blocks=50, overlap=overlap, prefix_caching=caching, groups=groups)
    faults = Faults(fail_at_launch=fails / 2, fail_at_wait=fails / 2, lose_memory=lost, min_gap=4, seed=seed)
    Day(house.build(faults), seed=seed, integrity=0.3).run(clients(seed, 25, CALM))  # which judges all of them


def test_who_breaks_steps_is_found_and_nobody_else_ends_with_an_error() -> None:
    """Requests of other groups are in the same steps: only one that was alone in all of them is given up."""
    for seed in (3, 4):
        house = House(rows=8, step_tokens=96, blocks=120, groups=3, overlap=bool(seed % 2))
        faults = Faults(fail_at_wait=0.005, slow=0.02, min_gap=10, poisoned_tokens=POISON, seed=seed)
        day = Day(house.build(faults), seed=seed, storm=0.001, integrity=0.02).run(clients(seed, 1200, ROUGH))
        ends = {one.finish for one in day.ends.values()}
        assert ends == {Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR}
        assert all(part.stats.tokens for part in day.scheduler.parts)


def ask(engine: Engine, id: str, prompt: list[int], output: int = 4, **more: object) -> Scheduler:
    """Where it was placed."""
    params = SamplingParams(temperature=0, max_tokens=output)
    engine.add(Request(id, prompt, params, max_tokens=output, seed=1, **more))  # type: ignore[arg-type]
    return next(part for part in engine.scheduler.parts if id in part.requests)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_requests_go_where_less_is_to_be_read() -> None:
    engine = House(groups=2, prefix_caching=False, blocks=400).build()
    first, second = engine.scheduler.parts
    assert ask(engine, "long", [2] * 400) is first
    assert ask(engine, "short", [3] * 20) is second
    assert ask(engine, "third", [4] * 20) is second, "the long one is still to be read"
    finish(engine)
    placed = [ask(engine, f"one{n}", [5 + n] * 9) for n in range(8)]
    assert placed.count(first) == placed.count(second) == 4


def test_a_group_that_has_the_beginning_gets_the_request_unless_it_is_much_busier() -> None:
    engine = House(groups=2, block_size=8, blocks=400).build()
    shared = [7 + n % 50 for n in range(160)]
    ask(engine, "busy", [3] * 50)
    holder = ask(engine, "first", shared)
    assert holder is engine.scheduler.parts[1]
    finish(engine)
    assert ask(engine, "again", [*shared, 60, 61]) is holder
    for number in range(12):
        ask(engine, f"more{number}", [*shared, 70 + number])
    assert {len(part.requests) > 2 for part in engine.scheduler.parts} == {True}
    finish(engine)
    assert holder.kv.stats.hit >= 160


def test_a_group_without_room_is_passed_over() -> None:
    engine = House(groups=2, rows=4, block_size=8, blocks=40, prefix_caching=False).build()
    first, second = engine.scheduler.parts
    ask(engine, "large", [3] * 200, output=60)
    for _ in range(8):
        engine.step()
    assert ask(engine, "next", [4] * 150) is second
    assert first.kv.pool.num_free < 20
    finish(engine)


def test_what_continues_another_goes_where_that_is_held() -> None:
    engine = House(groups=3, blocks=400).build()
    beginning = [9 + n % 30 for n in range(60)]
    ask(engine, "a", [3] * 30)
    holder = ask(engine, "turn", beginning, keep=True)
    finish(engine)
    for number in range(4):
        ask(engine, f"other{number}", [4 + number] * 5)
    assert ask(engine, "next", [*beginning, 8], continues="turn") is holder
    finish(engine)
    for part in engine.scheduler.parts:
        part.check_integrity()
