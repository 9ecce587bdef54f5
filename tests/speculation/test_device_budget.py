"""How many of a device's drafts rows verify: what the clock says pays, soon, and little is lost where nothing does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tokenmill.engine.speculation.device_budget import DeviceBudget
from tokenmill.engine.step import NODES
from tokenmill.step_time import Facts, FittedStepTime

LENGTH = 4


def run(
    steps: int, rows: int, seconds: Callable[[int, bool], float], chance: float, budget: DeviceBudget | None = None
) -> tuple[float, list[int], DeviceBudget]:
    """Tokens per second, in shares of those without drafts; the drafts per row of each step."""
    plain, drafting = FittedStepTime(per_token=0.02), FittedStepTime(per_token=0.02)
    if budget is None:
        budget = DeviceBudget(LENGTH, plain, drafting)
    else:
        plain, drafting = budget._plain, budget._drafting
    random, tokens, taken, lengths, ready = Random(3), 0, 0.0, [], False
    for _ in range(steps):
        length = budget.turn(rows, 512)
        verified = length if ready else 0  # of what the step before has drafted
        ready = length > 0
        took = seconds(rows * (1 + verified), length > 0)
        (drafting if length else plain).learn(Facts(decode_rows=rows * (1 + verified)), took)
        held = []
        for _ in range(rows if verified else 0):
            after = 0
            while after < verified and random.random() < chance:
                after += 1
            held.append(after)
        budget.count([verified] * len(held), held)
        tokens += rows + sum(held)
        taken += took
        lengths.append(verified)
    return tokens / taken * seconds(rows, False) / rows, lengths, budget


def gpu(tokens: int, drafting: bool) -> float:
    return 0.6e-3 * (1 + 0.004 * (tokens - 1)) + (0.12e-3 if drafting else 0.0)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_drafts_that_pay_are_verified_from_the_first_steps_on(rows: int) -> None:
    gain, lengths, _ = run(150, rows, gpu, 0.6)
    at_best = 1 + sum(0.6**depth for depth in range(1, LENGTH + 1))
    assert gain > 0.93 * at_best * gpu(rows, False) / gpu(rows * (1 + LENGTH), True) > 1
    assert lengths.count(0) < 16


@pytest.mark.parametrize(("rows", "chance"), [(1, 0.1), (32, 0.1), (100, 0.4)])
def test_drafts_that_do_not_pay_cost_little(rows: int, chance: float) -> None:
    dear = lambda tokens, drafting: (1.5 if drafting else 1.0) * 1e-3 * (1 + 0.02 * (tokens - 1))  # noqa: E731
    _, lengths, budget = run(512, rows, dear, chance)
    assert sum(map(bool, lengths)) < 16
    later, _, _ = run(4096, rows, dear, chance, budget)
    assert later > 0.99


def test_the_length_follows_from_what_tokens_cost() -> None:
    dear = lambda tokens, drafting: 1e-3 * (1 + 0.15 * (tokens - 1))  # noqa: E731
    _, lengths, _ = run(400, 1, dear, 0.6)
    assert 0 < sum(lengths[-100:]) / 100 < 3
    _, lengths, _ = run(400, 1, gpu, 0.8)
    assert sum(lengths[-100:]) / 100 > 3


def test_it_is_noticed_when_drafts_begin_to_hold_and_when_they_end_to() -> None:
    _, _, budget = run(600, 8, gpu, 0.02)
    _, lengths, _ = run(3000, 8, gpu, 0.7, budget)
    assert sum(map(bool, lengths[-200:])) > 190
    _, lengths, _ = run(1500, 8, gpu, 0.02, budget)
    assert sum(map(bool, lengths[-200:])) < 20


def test_a_step_without_room_has_no_drafts() -> None:
    budget = DeviceBudget(LENGTH, FittedStepTime(), FittedStepTime())
    assert not any(budget.turn(300, 512) for _ in range(50))
    assert max(budget.turn(200, 512) for _ in range(50)) == 1


def test_each_number_of_rows_is_tried_for_itself() -> None:
    slow_when_many = lambda tokens, drafting: gpu(tokens, drafting) * (3 if drafting and tokens > 40 else 1)  # noqa: E731
    _, few, budget = run(200, 2, slow_when_many, 0.7)
    _, many, _ = run(200, 64, slow_when_many, 0.7, budget)
    assert sum(map(bool, few[-50:])) == 50 and not any(many[-50:])


def test_where_drafts_do_not_pay_nobody_looks_at_steps_until_they_are_tried_again() -> None:
    dear = lambda tokens, drafting: (3 if drafting else 1) * 1e-3  # noqa: E731
    _, lengths, budget = run(40, 32, dear, 0.1)
    assert not any(lengths[-20:]) and not budget.rests(1)
    looked = []
    for _ in range(600):
        if not budget.rests(32):
            looked.append(budget.turn(32, 512))
    assert 8 <= len(looked) < 24 and max(looked) > 0


def with_trees(steps: int, tree_costs: float, tree_chance: float) -> tuple[list[bool], float]:
    """Which steps verified trees, and tokens per second in shares of those without drafts. Drafts of chains hold with a
    chance of 0.5."""
    times = [FittedStepTime(per_token=0.02) for _ in range(3)]
    budget, random, trees, tokens, taken, ready = DeviceBudget(LENGTH, *times), Random(5), [], 0, 0.0, None
    for _ in range(steps):
        length = budget.turn(1, 512, branches=True)
        verified, tree, ready = ready, budget.tree, length and budget.tree
        took = gpu(1 + length, length > 0) * (tree_costs if tree else 1)
        (times[2] if tree else times[1] if length else times[0]).learn(
            Facts(decode_rows=1 + NODES if tree else 1 + length), took
        )
        held, chance = 0, tree_chance if tree else 0.5
        while held < length and random.random() < chance:
            held += 1
        if length and tree and verified:
            budget.count_trees([held])
        elif length:
            budget.count([length], [held])
        trees.append(tree)
        tokens += 1 + held
        taken += took
    return trees, tokens / taken * gpu(1, False)


def test_trees_are_verified_where_they_bring_more_tokens_per_second() -> None:
    trees, gain = with_trees(400, tree_costs=1.1, tree_chance=0.7)
    assert sum(trees[-128:]) >= 122 and gain > 1.6
    for costs, chance in ((1.6, 0.7), (1.1, 0.4)):
        trees, gain = with_trees(2000, tree_costs=costs, tree_chance=chance)
        assert any(trees[:20]) and 0 < sum(trees[-256:]) < 16 and gain > 1.4


def test_where_no_row_may_branch_nothing_is_a_tree() -> None:
    budget = DeviceBudget(LENGTH, *(FittedStepTime() for _ in range(3)))
    assert not any(budget.turn(1, 512) and budget.tree for _ in range(50))
    budget = DeviceBudget(LENGTH, *(FittedStepTime() for _ in range(3)))
    assert not any(budget.turn(4, 40, branches=True) and budget.tree for _ in range(50))  # there is no room for them
