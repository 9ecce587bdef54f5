"""Drafts are on where they make answers faster, and off where they do not, by what is measured."""

from __future__ import annotations

from random import Random

from tokenmill.engine.speculation.payoff import LONGEST_PAUSE, Payoff


def run(payoff: Payoff, steps: int, brought: float, cost: float, rows: int = 4) -> tuple[int, float]:
    """Steps with drafts, and how much longer everything took than all of it without drafts would have."""
    random, on, seconds, tokens = Random(0), 0, 0.0, 0.0
    for _ in range(steps):
        if payoff.on(rows):
            took, got = cost * random.uniform(0.8, 1.2), brought * random.uniform(0.6, 1.4)
            payoff.learn(rows, got, took)
            on, seconds, tokens = on + 1, seconds + took, tokens + got
        else:
            payoff.rested(rows)
            seconds, tokens = seconds + 1, tokens + 1
    return on, seconds / tokens


def test_drafts_that_pay_stay_on() -> None:
    on, longer = run(Payoff(), 500, brought=1.75, cost=1.25)
    assert on == 500 and longer < 0.75


def test_drafts_that_do_not_pay_cost_little() -> None:
    on, longer = run(Payoff(), 2000, brought=1.0, cost=1.1)
    assert on < 150 and longer < 1.01


def test_drafts_that_are_far_too_slow_cost_little() -> None:
    payoff = Payoff()
    _, longer = run(payoff, 3000, brought=1.0, cost=4.0)
    assert longer < 1.04
    on, longer = run(payoff, 2 * LONGEST_PAUSE, brought=1.0, cost=4.0)
    assert 0 < on < 20 and longer < 1.02  # they are tried again, seldom


def test_it_is_noticed_when_things_change() -> None:
    payoff = Payoff()
    run(payoff, 100, brought=1.0, cost=1.5)
    assert not payoff.on(4)
    on, _ = run(payoff, 600, brought=2.0, cost=1.25)  # a text that repeats itself
    assert on > 400 and payoff.on(4)
    on, _ = run(payoff, 300, brought=1.0, cost=1.25)  # and then does not
    assert on < 100


def test_numbers_of_rows_are_judged_each_for_itself() -> None:
    payoff = Payoff()
    run(payoff, 100, brought=2.0, cost=1.25, rows=1)
    run(payoff, 100, brought=1.5, cost=2.2, rows=64)
    assert payoff.on(1) and not payoff.on(64)
