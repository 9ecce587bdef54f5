"""On a GPU an EAGLE-3 head drafts in recorded steps: its drafts hold where it knows its target, and change no token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "speculation"), str(Path(__file__).parents[1])]
from tiny import TINY, write_tiny
from tiny_drafts import drafted, made_eagle, permuting

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.device_budget import DeviceBudget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "device": "cuda", "max_num_seqs": 32, "max_model_len": 256,
}  # fmt: skip


def answers(llm: LLM, temperature: float) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=100, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + i, *range(5, 5 + 6 * i)]} for i in range(8)]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceBudget, "rests", lambda *_: False)
    monkeypatch.setattr(DeviceBudget, "turn", lambda self, rows, most, *_: min(self._length, most // rows - 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_a_head_that_knows_its_target_hold(tmp_path: Path, temperature: float) -> None:
    target, folder = permuting(tmp_path)
    with LLM(str(target), **OPTIONS, speculation="off") as llm:
        plain = answers(llm, temperature)
    with LLM(str(target), **OPTIONS, speculation=f"head:{folder}") as llm:
        runner, speculation = llm._built.engine.runner, llm._built.engine.speculation
        assert isinstance(runner, TorchRunner) and runner._graphs is not None and speculation is not None
        for _ in range(3):  # also with a warm prefix cache, and with sizes that are recorded when they return
            assert answers(llm, temperature) == plain
        stats = speculation.stats["head"]
        assert stats.drafted > 1000 and stats.accepted > 0.85 * stats.drafted
        assert runner._graphs.replays > 50


def test_a_head_that_knows_nothing_changes_no_token(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "head_dim": 64, "vocab_size": 512, "dtype": "float32"}
    model = write_tiny(tmp_path / "model", **shape)
    folder = made_eagle(tmp_path / "head", TINY | shape, [0, 1], draft_vocab=500)
    with LLM(model, **OPTIONS, load_format="dummy", speculation="off") as llm:
        plain = answers(llm, 0.0)
    with LLM(model, **OPTIONS, load_format="dummy", speculation=f"head:{folder}") as llm:
        assert answers(llm, 0.0) == plain and drafted(llm) > 200
