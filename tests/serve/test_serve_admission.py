"""The queue is bounded, the time it takes to drain is predicted, and the breaker opens and closes as it should."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import QueueFull
from tokenmill.serve.engine_client.admission import (
    RETRY_LEAST,
    RETRY_MOST,
    AdmissionControl,
    Backlog,
    CircuitBreaker,
    Overloaded,
)
from tokenmill.serve.settings import ServeSettings
from tokenmill.step_time import Facts

SETTINGS = ServeSettings(
    max_queued_tokens=1000, max_queued_requests=10, breaker_failures=3, breaker_window=10.0, breaker_seconds=5.0
)


def learned(base: float = 0.01, per_token: float = 0.0001, step_tokens: int = 500) -> AdmissionControl:
    """An admission that has seen a machine with these costs."""
    dice, admission = random.Random(1), AdmissionControl(SETTINGS)
    admission.max_step_tokens = step_tokens
    for _ in range(300):
        decodes, prompt = dice.choice([(1, 0), (8, 0), (64, 0), (0, step_tokens), (8, step_tokens - 8)])
        seconds = (base + per_token * (decodes + prompt)) * dice.uniform(0.95, 1.05)
        admission.learn_step(Facts(decodes, prefill_tokens=prompt), seconds)
    return admission


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3))
def test_the_cost_of_a_step_is_learned(base: float, per_token: float) -> None:
    admission = learned(base, per_token)
    for steps, tokens in [(1, 500), (10, 5000)]:
        true = base * steps + per_token * tokens
        assert admission.prefill_seconds(tokens) == pytest.approx(true, rel=0.25, abs=base)
    true = base * 100 + per_token * 6400
    assert admission.drain_seconds(Backlog(0, 6400.0, 64)) == pytest.approx(true, rel=0.25, abs=base)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 10_000), st.floats(1e-6, 10)), min_size=8, max_size=50))
def test_a_prediction_is_never_negative(steps: list[tuple[int, int, float]]) -> None:
    admission = AdmissionControl(SETTINGS)
    for decodes, prompt, seconds in steps:
        admission.learn_step(Facts(decodes, prefill_tokens=prompt, prefill_pairs=prompt**2 / 2), seconds)
    prices = admission.step_time.linear
    assert prices.base >= 0 and prices.per_row >= 0 and prices.per_prefill >= 0
    assert prices.base + prices.per_row + prices.per_prefill > 0
    assert admission.prefill_seconds(0) == 0.0 and admission.drain_seconds(Backlog()) == 0.0


def test_a_machine_that_grew_slower_is_noticed() -> None:
    admission = AdmissionControl(SETTINGS)
    for _ in range(1000):
        admission.learn_step(Facts(10), 0.01)
    for _ in range(1000):
        admission.learn_step(Facts(10), 0.1)
    assert admission.step_time.seconds(Facts(decode_rows=10)) == pytest.approx(0.1, rel=0.05)


def test_the_drain_time_of_a_simulated_backlog_is_predicted() -> None:
    base, per_token, rows = 0.01, 0.0001, 8
    admission = learned(base, per_token)
    prompts, answers = [100] * 40, [50] * 40
    # 8 at a time: 5 rounds, each a prefill of 800 tokens and 50 decode steps of 8
    true = 5 * (2 * base + 800 * per_token + 50 * (base + rows * per_token))
    predicted = admission.drain_seconds(Backlog(sum(prompts), sum(answers), rows))
    assert predicted == pytest.approx(true, rel=0.1)


def test_a_short_prompt_does_not_pay_for_the_contexts_of_long_ones() -> None:
    base, per_token, per_pair, chunk = 0.01, 0.0001, 2e-8, 500
    admission = AdmissionControl(SETTINGS)
    admission.max_step_tokens = chunk
    total = 0.0
    for _ in range(10):
        total = 0.0
        for start in range(0, 20_000, chunk):
            pairs = chunk * start + chunk * (chunk + 1) / 2
            seconds = base + per_token * chunk + per_pair * pairs  # the last one takes four times as long as the first
            admission.learn_step(Facts(prefill_tokens=chunk, prefill_pairs=pairs), seconds)
            total += seconds
    assert admission.prefill_seconds(chunk) == pytest.approx(base + per_token * chunk, rel=0.1)
    assert admission.drain_seconds(Backlog(queued_tokens=20_000)) == pytest.approx(total, rel=0.4)


def check(
    admission: AdmissionControl, queued: int, queued_tokens: int, tokens: int, timeout: float | None = None
) -> None:
    load = Backlog(queued_tokens, 50.0 * queued, 8)
    admission.check(queued, queued_tokens, tokens, 1, lambda: load)
    if timeout is not None:
        admission.check_deadline(queued_tokens, tokens, timeout, lambda: load)


def test_the_queue_is_bounded_in_tokens_and_requests() -> None:
    admission = learned()
    check(admission, 9, 900, 100)
    with pytest.raises(Overloaded, match="900 prompt tokens are waiting and this request has 101"):
        check(admission, 9, 900, 101)
    with pytest.raises(QueueFull, match="10 requests are waiting, the limit is 10"):
        check(admission, 10, 10, 1)
    check(admission, 0, 0, 100_000)  # an empty queue takes any request: it could never come in otherwise


def test_retry_after_grows_with_the_backlog_and_stays_sane() -> None:
    admission = learned()
    waits = [admission.retry_after(Backlog(1000, output, 8), 1.0) for output in (10, 5_000, 50_000, 1e9)]
    assert waits == sorted(waits) and waits[0] == RETRY_LEAST and waits[-1] == RETRY_MOST and waits[1] < waits[2]
    assert AdmissionControl(SETTINGS).retry_after(Backlog(1000, 1e9, 8), 1.0) == RETRY_LEAST  # nothing measured yet


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    admission = learned()  # 1000 tokens: 2 steps of 0.06 s
    check(admission, 5, 900, 100, timeout=1.0)
    with pytest.raises(Overloaded, match=r"the deadline is 0[.]05 s away"):
        check(admission, 5, 900, 100, timeout=0.05)
    check(AdmissionControl(SETTINGS), 5, 900, 100, timeout=0.0001)  # without a measurement nobody is refused


def test_what_an_answer_will_still_say_is_bounded_and_learned() -> None:
    admission = AdmissionControl(SETTINGS)
    for _ in range(200):
        admission.learn_answer(300)
    assert admission.expected_output(0, 1000) == pytest.approx(300, rel=0.05)
    assert admission.expected_output(0, 20) == 20
    assert admission.expected_output(800, 1000) == 200
    assert admission.expected_output(999, 1000) == 1


# The breaker


def test_failures_within_the_window_open_the_breaker_and_others_do_not() -> None:
    breaker = CircuitBreaker(SETTINGS)
    assert not any(breaker.failed(at) for at in (0.0, 20.0, 40.0, 60.0))
    assert breaker.state(60.0) == "closed" and breaker.admit(60.0) is None
    assert not breaker.failed(61.0) and breaker.failed(62.0)
    assert breaker.state(62.0) == "open"
    assert breaker.admit(63.0) == pytest.approx(4.0)


def test_one_probe_at_a_time_and_its_answer_closes() -> None:
    breaker = CircuitBreaker(SETTINGS)
    for at in (0.0, 1.0, 2.0):
        breaker.failed(at)
    assert not breaker.succeeded(3.0) and breaker.state(3.0) == "open"  # too early to trust it
    assert breaker.admit(7.5) is None
    assert breaker.admit(7.6) is not None
    breaker.probe_ended()
    assert breaker.admit(7.7) is None
    assert breaker.succeeded(8.0) and breaker.state(8.0) == "closed"
    assert not breaker.failed(8.5)  # it starts counting anew


def test_a_failed_probe_opens_it_for_another_while() -> None:
    breaker = CircuitBreaker(SETTINGS)
    for at in (0.0, 1.0, 2.0):
        breaker.failed(at)
    assert breaker.admit(8.0) is None
    assert not breaker.failed(9.0)  # it was open already
    assert breaker.state(13.9) == "open" and breaker.state(14.1) == "half_open"
