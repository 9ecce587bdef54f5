"""Workloads: what the three kinds of trace become, and the figures that the planner takes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.plan.demand.traces import read_trace
from tokenmill.plan.demand.workload import Workload, fixed, percentile

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def test_azure_lines_become_requests(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:05.5000000,20,7\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0000000,10,0\n"
    )
    work = read_trace(path)
    assert work.prompts == (4808, 20) and work.outputs == (10, 7)  # sorted, and who got nothing is left out
    assert work.arrivals[0] == 0 and work.arrivals[1] == pytest.approx(1.52004)
    assert read_trace(path, rate=10).rate == pytest.approx(10)


def test_mooncake_lines_become_requests_with_shared_beginnings(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    lines = [(0, 1100, 5, [1, 2, 3]), (2500, 1030, 6, [1, 2, 4]), (3000, 600, 6, [9, 2])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": n, "output_length": out, "hash_ids": ids}) + "\n"
            for at, n, out, ids in lines
        )
    )
    work = read_trace(path)
    assert work.arrivals == (0, 2.5, 3.0)
    assert work.hash_ids == ((1, 2, 3), (1, 2, 4), (9, 2))
    assert work.cached_share() == pytest.approx(1024 / 2730)  # a block counts only behind its own beginning
    assert work.cached_share(capacity=512) == pytest.approx(512 / 2730)  # beginnings are kept longest


def test_sharegpt_conversations_become_their_first_exchange(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [
        {"from": "human", "value": "abc def ghij"},
        {"from": "gpt", "value": "klm nopq"},
        {"from": "human", "value": "f"},
    ]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}, {"id": "empty"}]))
    work = read_trace(path, rate=2.0)
    assert (work.prompts, work.outputs, work.texts) == ((3,), (2,), ("abc def ghij",))


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"input_length": 3}\n', "TIMESTAMP,ContextTokens\n1,2\n", "[1"])
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "count"), [("AzureLLMInferenceTrace_conv.csv", 19_366), ("mooncake_conversation_trace.jsonl", 12_031)]
)
def test_the_public_traces_are_read_whole(name, count):
    if not (DATA / name).is_file():
        pytest.skip("the public traces are not here")
    work = read_trace(DATA / name)
    assert len(work) == count
    assert 3_400 < work.seconds < 3_600
    assert work.rate < work.busy[0] < 2 * work.rate
    assert len(read_trace(DATA / name, limit=100)) == 100


def test_busy_minutes_count_and_pauses_do_not_make_a_burst():
    calm = fixed("calm", 600, 10, 10, rate=1.0)
    later = [at + 3600 for at in calm.arrivals]
    twice = Workload("pause", (*calm.arrivals, *later), calm.prompts * 2, calm.outputs * 2)
    assert 0.8 < twice.busy[0] < 1.6  # not the mean of an hour
    assert 0.5 < twice.busy[1] < 2


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_covers_its_share(values, share):
    found = percentile(values, share)
    assert sum(one <= found for one in values) >= share * len(values)
    assert sum(one < found for one in values) < share * len(values)
