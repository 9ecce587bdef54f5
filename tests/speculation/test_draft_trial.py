"""Drafts are switched on where they make answers faster, and off where they do not, by what is measured."""

from __future__ import annotations

from random import Random

from tokenmill.engine.speculation.trial import LONGEST_PAUSE, Trial


def run(trial: Trial, steps: int, plain: float, drafted: float, per_step: float, rows: int = 4) -> tuple[int, float]:
    """Steps with drafts, and how much longer everything took than all of it without drafts would have."""
    random, on, seconds, tokens = Random(0), 0, 0.0, 0.0
    for _ in range(steps):
        drafts = trial.on(rows)
        took = (drafted if drafts else plain) * random.uniform(0.97, 1.03)
        brought = round(rows * per_step) if drafts else rows
        trial.learn(rows, brought, took, drafts)
        on, seconds, tokens = on + drafts, seconds + took, tokens + brought
    return on, seconds / (tokens / rows * plain)


def test_drafts_that_pay_stay_on() -> None:
    on, longer = run(Trial(), 500, plain=4e-3, drafted=5e-3, per_step=1.75)
    assert on > 485 and longer < 0.75


def test_drafts_that_do_not_pay_cost_little() -> None:
    on, longer = run(Trial(), 2000, plain=4e-3, drafted=4.4e-3, per_step=1.0)
    assert on < 150 and longer < 1.01


def test_drafts_that_are_far_too_slow_cost_little() -> None:
    trial = Trial()
    _, longer = run(trial, 3000, plain=4e-3, drafted=16e-3, per_step=1.0)
    assert longer < 1.04
    on, longer = run(trial, 2 * LONGEST_PAUSE, plain=4e-3, drafted=16e-3, per_step=1.0)
    assert 0 < on < 20 and longer < 1.02  # it is tried again, seldom


def test_it_is_noticed_when_things_change() -> None:
    trial = Trial()
    run(trial, 100, plain=4e-3, drafted=6e-3, per_step=1.0)
    assert not trial.on(4)
    on, _ = run(trial, 600, plain=4e-3, drafted=5e-3, per_step=2.0)  # a text that repeats itself
    assert on > 300 and trial.on(4)
    run(trial, 60, plain=4e-3, drafted=5e-3, per_step=1.0)  # and then does not
    assert not trial.on(4)


def test_numbers_of_rows_are_judged_each_for_itself() -> None:
    trial = Trial()
    run(trial, 100, plain=4e-3, drafted=5e-3, per_step=2.0, rows=1)
    run(trial, 100, plain=4e-3, drafted=9e-3, per_step=1.5, rows=64)
    assert trial.on(1) and not trial.on(64)
