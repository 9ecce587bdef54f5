"""The fitted model of step times: it finds what made the times, keeps up with a machine, and begins with a prior."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.step_time import TYPICAL, Facts, FittedStepTime, LinearStepTime

TRUE = LinearStepTime(4e-3, 1e-4, 1e-6, 5e-5, 1e-8)


def facts(rows: int, context: int, chunk: int, start: int = 0) -> Facts:
    return Facts(rows, rows * context, chunk, chunk * start + chunk * (chunk + 1) / 2)


STEPS = [facts(rows, 40 + 7 * rows, chunk) for rows in (0, 1, 4, 16) for chunk in (0, 64, 512) if rows or chunk]


def fitted(steps: list[tuple[Facts, float]], **settings: float) -> FittedStepTime:
    model = FittedStepTime(**settings)  # type: ignore[arg-type]
    for one, seconds in steps:
        model.learn(one, seconds)
    return model


def test_the_prices_that_made_the_times_are_found_again() -> None:
    model = fitted([(one, TRUE.seconds(one)) for one in STEPS * 20])
    for one in STEPS:
        assert model.seconds(one) == pytest.approx(TRUE.seconds(one), rel=0.02)
    unseen = facts(8, 600, 128, start=200)
    assert model.seconds(unseen) == pytest.approx(TRUE.seconds(unseen), rel=0.3)


def test_noise_is_averaged_out() -> None:
    dice = random.Random(3)
    steps = [dice.choice(STEPS) for _ in range(600)]
    model = fitted([(one, TRUE.seconds(one) * dice.uniform(0.8, 1.2)) for one in steps])
    for one in STEPS:
        assert model.seconds(one) == pytest.approx(TRUE.seconds(one), rel=0.1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 10_000), st.floats(1e-6, 10)), min_size=1, max_size=50),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
def test_no_price_is_negative_and_no_step_is_free(steps: list[tuple[int, int, float]], rows: int, chunk: int) -> None:
    model = fitted([(facts(rows, 100, chunk), seconds) for rows, chunk, seconds in steps])
    prices = model.linear
    assert min(prices.base, prices.per_row, prices.per_context, prices.per_prefill, prices.per_pair) >= 0
    assert model.seconds(facts(1 + rows, 100, 1 + chunk)) > 0


def test_whoever_gets_cheaper_with_more_work_is_taken_to_cost_nothing() -> None:
    prices = fitted([(one, 1.0 - 1e-4 * one.prefill_tokens) for one in STEPS * 5]).linear
    assert min(prices.per_row, prices.per_context, prices.per_prefill, prices.per_pair) >= 0 and prices.base > 0


def test_a_machine_that_grew_slower_is_noticed_also_where_nothing_varies() -> None:
    """Thousands of equal steps must neither blow up nor freeze what is known."""
    one = facts(1, 10, 0)
    model = fitted([(one, 0.01)] * 20_000, forgetting=0.995)
    for _ in range(1000):
        model.learn(one, 0.1)
    assert model.seconds(one) == pytest.approx(0.1, rel=0.02)


def test_nothing_is_known_before_some_steps_were_seen() -> None:
    model = FittedStepTime()
    for number in range(8):
        assert not model.known, number
        model.learn(STEPS[number], 0.01)
    assert model.known


def test_a_prior_is_asked_until_steps_say_otherwise_and_where_they_say_nothing() -> None:
    model = FittedStepTime(TRUE)
    assert model.known
    for one in TYPICAL:
        assert model.seconds(one) == pytest.approx(TRUE.seconds(one), rel=0.05)
    decoding = facts(64, 500, 0)
    for _ in range(200):  # decoding takes twice as long as was believed; no prompt was seen
        model.learn(decoding, 2 * TRUE.seconds(decoding))
    assert model.seconds(decoding) == pytest.approx(2 * TRUE.seconds(decoding), rel=0.05)
    prompt = model.seconds(facts(64, 500, 512)) - model.seconds(decoding)
    assert prompt == pytest.approx(TRUE.seconds(facts(0, 0, 512)) - TRUE.base, rel=0.2)


def decoding(tokens: int) -> Facts:
    return Facts(decode_rows=tokens)


def test_times_are_learned_by_size_through_noise() -> None:
    model, dice = FittedStepTime(per_token=0.2), random.Random(0)

    def truth(tokens: int) -> float:
        return 2e-3 * (1.0 if tokens <= 4 else 1.8)

    for _ in range(300):
        tokens = dice.choice([1, 2, 4, 8])
        noise = 3.0 if dice.random() < 0.03 else dice.uniform(0.95, 1.05)
        model.learn(decoding(tokens), truth(tokens) * noise)
    assert model.decoding(np.array([1, 2, 4, 8])) == pytest.approx([2e-3, 2e-3, 2e-3, 3.6e-3], rel=0.1)


def test_times_follow_a_machine_that_becomes_slower() -> None:
    model = FittedStepTime(per_token=0.1)
    for seconds in (1e-3, 2e-3):
        for _ in range(200):
            model.learn(decoding(1), seconds)
    one, four = model.decoding(np.array([1, 4]))
    assert one == pytest.approx(2e-3, rel=0.05) and four == pytest.approx(2.6e-3, rel=0.1)


def test_prompts_are_priced_and_do_not_touch_what_decoding_takes() -> None:
    """Decoding in tiles of four rows, beside prompts that take far longer: one model tells both."""
    model, dice = FittedStepTime(per_token=0.1), random.Random(1)

    def truth(one: Facts) -> float:
        return 2e-3 * -(-one.decode_rows // 4) + 1e-3 * one.prefill_tokens

    steps = [Facts(rows, 0, chunk) for rows in (1, 4, 5, 8) for chunk in (0, 0, 64, 256)]
    assert not model.knows_decoding
    model.learn(Facts(0, 0, 64), 1.0)
    assert not model.knows_decoding
    for _ in range(600):
        one = dice.choice(steps)
        model.learn(one, truth(one) * dice.uniform(0.95, 1.05))
    assert model.knows_decoding
    assert model.decoding(np.array([1, 4, 5, 8])) == pytest.approx([2e-3, 2e-3, 4e-3, 4e-3], rel=0.1)
    assert model.seconds(Facts(4, 0, 256)) == pytest.approx(truth(Facts(4, 0, 256)), rel=0.05)
