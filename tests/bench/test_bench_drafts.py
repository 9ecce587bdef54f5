"""Drafts of known answers are right as often as is asked for, and the benchmark says what they brought."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "speculation"))
from tiny_drafts import make_drafts_free

from tokenmill import SamplingParams
from tokenmill.bench.drafts import Replay
from tokenmill.cli import bench_offline
from tokenmill.cli.app import app
from tokenmill.engine import choices
from tokenmill.engine.request import Request
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.proposer import MAX_DRAFTS
from tokenmill.engine.speculation.replay import ReplayProposer
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import ConfigError

TINY = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float64", "--no-ceilings"]
SIZES = ["--batch", "1,4", "--input", "12", "--output", "60", "--repeats", "2"]


def latency(model: str, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "latency", model, *TINY, *SIZES, *words])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def points(model: str, *words: str) -> list[dict[str, Any]]:
    found = json.loads(latency(model, *words, "--json", "-"))["points"]
    assert isinstance(found, list)
    return found


def request(prompt: list[int], said: list[int]) -> Request:
    one = Request("a", prompt, SamplingParams(), max_tokens=10_000, seed=0)
    one.tokens += said
    return one


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_a_token_is_right_with_the_set_probability_whatever_came_before(acceptance: float) -> None:
    answer = [3 + number % 90 for number in range(4000)]
    proposer = ReplayProposer(acceptance, length=3, vocab=100)
    proposer.learn([1, 2], answer)
    right, after_right = 0, []
    for said in range(3990):
        [draft] = proposer.propose([request([1, 2], answer[:said])], 8)
        assert draft is not None and len(draft.tokens) == 3 and all(0 <= token < 100 for token in draft.tokens)
        holds = [one == other for one, other in zip(draft.tokens, answer[said:])]
        right += holds[0]
        after_right += [holds[1]] if holds[0] else []
        proposer.ended(request([1, 2], []))
    assert right / 3990 == pytest.approx(acceptance, abs=0.03)
    assert not after_right or sum(after_right) / len(after_right) == pytest.approx(acceptance, abs=0.03)


def test_tokens_that_are_on_their_way_are_bridged() -> None:
    proposer = ReplayProposer(1.0, length=2, vocab=100)
    proposer.learn([1], list(range(10, 30)))
    one = request([1], [10, 11])
    one.pending, one.unsure = 1, 2
    [draft] = proposer.propose([one], 16)
    assert draft is not None and draft.tokens == [12, 13, 14, 15, 16]
    proposer.ended(one)
    assert proposer.propose([request([9], [])], 16) == [None]


def test_drafts_hold_as_often_as_is_asked_and_change_no_answer(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    for point in points(tiny_model, "--draft-acceptance", "1", "--draft-tokens", "3"):
        found = point["drafts"]
        assert found["drafted"] == found["accepted"] > 60 * point["batch"]
        assert found["accepted_length"] == pytest.approx(3, abs=0.3)  # the last step of an answer has room for fewer
        assert found["same_answers"] == found["answers"] == 2 * point["batch"]
        rates = found["tokens_per_second_with_drafts"], found["tokens_per_second"]
        assert found["times_as_fast"] == pytest.approx(rates[0] / rates[1]) and min(rates) > 0
    for point in points(tiny_model, "--draft-acceptance", "0.5", "--draft-tokens", "3"):
        assert point["drafts"]["same_answers"] == point["drafts"]["answers"]
        assert 0.5 < point["drafts"]["accepted_length"] < 1.3  # 0.5 + 0.25 + 0.125


def test_without_the_option_nothing_is_drafted_and_with_it_one_table_says_both(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    assert all("drafts" not in point for point in points(tiny_model))
    told = latency(tiny_model, "--draft-acceptance", "0.8").splitlines()
    head = next(number for number, line in enumerate(told) if "with/s" in line)
    assert "up to 4 drafts per step and row, each right with probability 0.8" in told[head - 1]
    assert [line.split()[0] for line in told[head + 1 : head + 3]] == ["1", "4"]


def test_steps_that_fail_with_drafts_are_told(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed again without, so that figures would be of something else."""
    make_drafts_free(monkeypatch)
    launch = TorchRunner.launch

    def fails_with_drafts(runner: TorchRunner, step: Step) -> Pending:
        if step.drafts:
            raise RuntimeError("out of luck")
        return launch(runner, step)

    monkeypatch.setattr(TorchRunner, "launch", fails_with_drafts)
    assert "steps with drafts failed" in latency(tiny_model, "--draft-acceptance", "1", code=1)


def test_what_makes_no_sense_is_refused(tiny_model: str) -> None:
    assert "say how often they are right" in latency(tiny_model, "--draft-tokens", "3", code=2)
    assert "needs batching" in latency(tiny_model, "--draft-acceptance", "1", "--no-kv-cache", code=2)
    told = latency(tiny_model, "--draft-acceptance", "1", "--draft-tokens", str(MAX_DRAFTS + 1), code=2)
    assert f"an engine verifies at most {MAX_DRAFTS}" in told


def test_a_gpu_records_steps_with_drafts_before_the_first_one(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def opened(model: str, options: dict[str, Any], ceilings: bool) -> None:
        found.update(options)
        raise ConfigError("that is enough")

    monkeypatch.setattr(bench_offline, "_opened", opened)
    monkeypatch.setattr(choices, "choose_device", lambda wanted: torch.device("cuda"))
    assert "that is enough" in latency(tiny_model, "--draft-acceptance", "0.8", code=2)
    assert found["speculation"] == "suffix"


@pytest.mark.parametrize(("device", "beside"), [("cpu", False), ("cuda", True)])
def test_drafts_are_weighed_as_the_engine_of_the_device_weighs_them(device: str, beside: bool) -> None:
    """A GPU computes while drafts are asked for: what that takes is no part of a step's time there."""
    limits = SimpleNamespace(max_rows=4, max_verified=8)
    runner, scheduler = SimpleNamespace(device=torch.device(device)), SimpleNamespace(limits=limits)
    engine = SimpleNamespace(scheduler=scheduler, runner=runner)
    llm: Any = SimpleNamespace(_built=SimpleNamespace(engine=engine), _processor=SimpleNamespace(vocab_size=100))
    assert Replay(llm, 0.8, 4, seed=0)._speculation.beside is beside
