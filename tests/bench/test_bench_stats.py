"""Percentiles, intervals and figures: what a benchmark makes of times."""

from __future__ import annotations

import random
import statistics

import pytest

from tokenmill.bench.cost import cost, parse_price
from tokenmill.bench.figures import Answer, Run, of_point, of_run, tokens_over_time
from tokenmill.bench.stats import over_repeats, percentile, resampled, spread, student
from tokenmill.bench.table import against_rate, lines
from tokenmill.errors import ConfigError
from tokenmill.plan.demand.slo import Slo


def test_percentiles_are_interpolated() -> None:
    assert percentile([], 50) is None and percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5 and percentile(list(map(float, range(101))), 99) == 99.0
    assert spread([1.0, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert spread([])["mean"] is None


def test_students_t_is_the_tables() -> None:
    for freedom, right in ((1, 12.706), (4, 2.776), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000), (1000, 1.962)):
        assert student(freedom) == pytest.approx(right, abs=6e-4)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    dice = random.Random(5)
    tries, held_repeats, held_requests = 300, 0, 0
    for number in range(tries):
        low, high = over_repeats([dice.gauss(10, 2) for _ in range(5)]) or (0, 0)
        held_repeats += low <= 10 <= high
        values = [dice.expovariate(0.1) for _ in range(60)]
        low, high = resampled(values, lambda drawn: statistics.fmean(drawn), number) or (0, 0)
        held_requests += low <= 10 <= high
    assert 0.91 < held_repeats / tries < 0.99
    assert 0.88 < held_requests / tries < 0.99  # a little less: skewed, and only 60 to draw from
    assert over_repeats([1.0]) is None and resampled([1.0], statistics.fmean) is None
    assert over_repeats([1.0, 100.0])[0] == 0.0  # type: ignore[index]


def run_of(*answers: Answer, seconds: float = 2.0) -> Run:
    return Run(seconds, list(answers))


def one(times: list[float], tokens: int | None = None, **more: object) -> Answer:
    count = len(times) if tokens is None else tokens
    return Answer(times[-1] + 0.01, times=times, prompt_tokens=10, output_tokens=count, **more)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    run = run_of(one([0.1, 0.2, 0.4]), one([0.3, 0.7], tokens=5), Answer(9.0, error="timeout"))
    found = of_run(run)
    assert (found["requests"], found["completed"], found["prompt_tokens"], found["output_tokens"]) == (3, 2, 20, 8)
    assert found["output_tokens_per_second"] == 4.0 and found["total_tokens_per_second"] == 14.0
    assert found["requests_per_second"] == 1.0
    assert found["ttft"]["mean"] == pytest.approx(0.2) and found["e2e"]["mean"] == pytest.approx(0.56)
    assert found["itl"]["mean"] == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert found["tpot"]["mean"] == pytest.approx((0.15 + 0.1) / 2), "events may hold several tokens"


def test_what_broke_off_is_no_throughput() -> None:
    found = of_run(run_of(one([0.1, 0.2]), one([0.1, 0.2, 0.3], error="no end")))
    assert (found["prompt_tokens"], found["output_tokens"]) == (10, 2)


def test_requests_that_timed_out_are_counted_beside_the_latencies_of_the_others() -> None:
    failed = [Answer(60.0, error=kind) for kind in ("timeout", "deadline_exceeded", "status 504", "status 429")]
    found = of_point([run_of(one([0.1, 0.2]), *failed), run_of(one([0.3, 0.4]), failed[0])])
    assert (found["requests"], found["completed"], found["timed_out"]) == (7, 2, 4)
    assert [repeat["timed_out"] for repeat in found["repeats"]] == [3, 1]
    assert found["latencies_of"] == "completed requests" and found["e2e"]["p99"] < 1
    told = list(lines(found, "1 stream"))
    assert "latencies   of 2 completed requests; timed out: 4" in told
    fine = of_point([run_of(one([0.1, 0.2]))])
    head, *rows = against_rate([fine | {"rate": 1.0}, found | {"rate": 2.0}])
    assert head.endswith("timed out") and [row.split()[-1] for row in rows] == ["0", "4"]


def test_goodput_counts_who_got_what_was_promised() -> None:
    promise = Slo(ttft=0.25, itl=0.1, share=0.5)
    fast, late, slow = one([0.2, 0.25, 0.5]), one([0.3, 0.35]), one([0.1, 0.3, 0.5, 0.55])
    assert [answer.within(promise) for answer in (fast, late, slow)] == [True, False, False]
    failed = Answer(1.0, times=[0.1], error="no end")
    found = of_run(run_of(fast, late, slow, failed), promise)["goodput"]
    assert found == {"share": 0.25, "requests_per_second": 0.5}
    assert one([0.2]).within(promise), "an answer of one token has no gaps to be slow in"


def test_repeats_are_pooled_and_give_intervals() -> None:
    runs = [run_of(one([0.1, 0.2]), seconds=seconds) for seconds in (1.0, 1.1, 0.9)]
    found = of_point(runs)
    low, high = found["interval"]["output_tokens_per_second"]
    assert low < 2.0 < high and high - low < 1.5
    assert found["output_tokens_per_second"] == pytest.approx(2.0) and len(found["repeats"]) == 3
    assert of_point(runs[:1])["interval"]["output_tokens_per_second"] is None
    text = "\n".join(lines(found, "3 streams"))
    assert "3 requests in 3 repeats, 3 streams" in text and f"({low:.2f} to {high:.2f})" in text


def test_tokens_fall_into_the_seconds_in_which_they_came() -> None:
    runs = [run_of(one([0.5, 1.5]), one([0.1], tokens=4, start=2.0)), run_of(one([0.5, 1.5]))]
    assert tokens_over_time(runs, 1.0) == [(0.5, 1.0), (1.5, 1.0), (2.5, 2.0)]


def test_a_million_tokens_have_their_price() -> None:
    found = {"total_tokens_per_second": 1000.0, "output_tokens_per_second": 250.0}
    assert parse_price("3.6/h") == parse_price("$3.6") == 3.6 and parse_price(None) is None
    prices = cost(3.6, found)
    assert prices["per_million_tokens"] == pytest.approx(1.0)
    assert prices["per_million_output_tokens"] == pytest.approx(4.0)
    assert cost(3.6, found | {"output_tokens_per_second": 0.0})["per_million_output_tokens"] is None
    for wrong in ("cheap", "-1/h", "nan"):
        with pytest.raises(ConfigError):
            parse_price(wrong)
