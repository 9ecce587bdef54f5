"""What a benchmark asks: prompts, shared beginnings, and times that have the rate and the bursts asked for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tokenmill.bench.workloads import WARM_TOKENS, Mix, arrivals, clipped
from tokenmill.errors import ConfigError
from tokenmill.plan.demand.traces import read_trace
from tokenmill.plan.demand.workload import Workload, fixed

BLOCK = 512


def shared(left: list[str], right: list[str]) -> int:
    return next((place for place, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (4.0, 2.0), (0.25, 0.5), (0.0, 0.0)])
def test_random_times_have_the_rate_and_the_burstiness_asked_for(burstiness: float, spread: float) -> None:
    starts = arrivals(20_000, 50.0, burstiness, seed=3)
    gaps = [after - before for before, after in pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    assert starts[0] == 0 and mean == pytest.approx(1 / 50, rel=0.06)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(spread, rel=0.1, abs=1e-6)
    assert arrivals(5, 1.0, burstiness, 1) == arrivals(5, 1.0, burstiness, 1) and len(arrivals(1, 1.0, 1.0, 0)) == 1


def test_prompts_have_their_length_and_are_no_two_alike() -> None:
    mix = Mix(fixed("equal", 20, 30, 7))
    asks = mix.asks(1)
    prompts = [str(ask.prompt) for ask in asks]
    assert all(len(prompt.split()) == 30 for prompt in prompts) and len(set(prompts)) == 20
    assert all((ask.max_tokens, ask.at) == (7, None) for ask in asks)
    assert asks == mix.asks(1) and not {ask.prompt for ask in mix.asks(2)} & set(prompts)  # type: ignore[comparison-overlap]


def test_token_ids_are_in_the_vocabulary() -> None:
    asks = Mix(fixed("equal", 5, 40, 7), vocab=11).asks(0)
    assert all(len(ask.prompt) == 40 and set(ask.prompt) <= set(range(11)) for ask in asks)


def test_equal_hash_ids_are_an_equal_beginning_and_nothing_more(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 2 * BLOCK + 5, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 3 * BLOCK, "output_length": 4, "hash_ids": [1, 2, 4]},
        {"timestamp": 4000, "input_length": BLOCK + 9, "output_length": 4, "hash_ids": [9, 2]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asks = Mix(read_trace(path), speed=10).asks(0)
    assert [ask.at for ask in asks] == pytest.approx([0, 0.1, 0.4])
    words = [str(ask.prompt).split() for ask in asks]
    assert [len(prompt) for prompt in words] == [2 * BLOCK + 5, 3 * BLOCK, BLOCK + 9]
    assert 2 * BLOCK <= shared(words[0], words[1]) < 2 * BLOCK + 5
    assert shared(words[0], words[2]) < 5
    again = [str(ask.prompt).split() for ask in Mix(read_trace(path)).asks(7)]
    assert shared(again[0], words[0]) < 5, "another seed has other prompts"
    assert shared(again[0], again[1]) >= 2 * BLOCK, "which share what the trace shares"


def test_texts_are_asked_as_they_are_and_lengths_can_be_cut() -> None:
    work = Workload("talk", (0.0, 1.0), (9, 90), (5, 50), texts=("Hello?", "A long one."))
    assert [ask.prompt for ask in Mix(work).asks(0)] == ["Hello?", "A long one."]
    cut = clipped(Workload("any", (0.0, 1.0), (9, 90), (5, 50)), 20, 10)
    assert cut.prompts == (9, 20) and cut.outputs == (5, 10)
    assert clipped(work, None, None) == work


def test_a_warm_up_is_short_and_shares_nothing_with_what_is_measured() -> None:
    mix = Mix(fixed("equal", 6, 30, 100), rate=5.0)
    warm = mix.warm_up(4, 1)
    assert len(warm) == 4 and all(ask.max_tokens == WARM_TOKENS and ask.at is None for ask in warm)
    assert not {str(ask.prompt) for ask in warm} & {str(ask.prompt) for ask in mix.asks(1)}


def test_what_makes_no_sense_is_refused() -> None:
    work = fixed("equal", 2, 3, 4)
    for wrong in ({"rate": 1.0, "speed": 2.0}, {"rate": 0.0}, {"speed": -1.0}, {"burstiness": -1.0}):
        with pytest.raises(ConfigError):
            Mix(work, **wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,abc,3\n", "line 2: TIMESTAMP, ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5\n", "line 2: TIMESTAMP, ContextTokens"),
        ('{"timestamp": 0, "input_length": 3, "output_length": []}\n', "request 1: timestamp, input_length"),
        ('{"timestamp": 0, "input_len\n', "request 1: this is not JSON"),
    ],
)
def test_what_is_wrong_with_a_line_of_a_trace_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        read_trace(path)
    assert "JSON" in said or str(refused.value).endswith("must be a time and two whole numbers")
