"""EAGLE-3 heads at the end of recorded steps: tokens stay the same, drafts of a head that knows its target hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder
from test_drafts_on_device import FakeStaging, Graphs, Unrecorded, behind_the_host, runner_of

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "speculation")]
from test_eagle import chain
from tiny import TINY, write_tiny
from tiny_drafts import made_eagle, make_drafts_free, permuting

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.engine.runner.drafters import Verified
from tokenmill.engine.runner.recordings import WIDTHS
from tokenmill.engine.speculation import eagle
from tokenmill.engine.speculation.device_budget import DeviceBudget
from tokenmill.engine.speculation.device_eagle import DeviceEagle
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.model.eagle import EagleHead
from tokenmill.ops.registry import select

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8, "ops": "reference", "cuda_graphs": False,
    "max_model_len": 128, "overlap": True,
}  # fmt: skip
ROWS = 64  # tokens of a recorded step


def on_device(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, folder: Path, graphs: type[DecodeGraphs] = Graphs
) -> tuple[Speculation, DecodeGraphs]:
    """Have the head draft as it would on a GPU."""
    runner = runner_of(llm)
    monkeypatch.setattr(eagle, "select", lambda need: select(need, "reference"))
    head = DeviceEagle(EagleHead.load(folder, llm._built.spec), runner, ROWS)
    behind_the_host(monkeypatch, runner)
    decoding = graphs(runner.decoder, runner.state, runner.sampler, ROWS)
    runner._graphs = decoding
    runner.decode_paths = [decoding]
    runner.draft_with(head)
    runner.read_with(head)
    speculation = Speculation(ROWS, 0.0, [head])
    llm._built.engine.speculation = speculation
    return speculation, decoding


def answers(llm: LLM, temperature: float, tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + i, *range(5, 5 + 6 * i)]} for i in range(5)]
    found = []
    for _ in range(2):  # the second time with a warm prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(one.error is None for one in outputs)
        found += [list(one.outputs[0].token_ids) for one in outputs]
    return found


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    monkeypatch.setattr(DeviceBudget, "rests", lambda *_: False)
    monkeypatch.setattr(DeviceBudget, "turn", lambda self, rows, most, *_: min(self._length, most // rows - 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_a_head_that_knows_its_target_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    target, folder = permuting(tmp_path)
    with LLM(str(target), **OPTIONS, speculation="off") as llm:
        plain = answers(llm, temperature, 36)
    with LLM(str(target), **OPTIONS, speculation="off") as llm:
        speculation, decoding = on_device(monkeypatch, llm, folder)
        assert answers(llm, temperature, 36) == plain
        stats = speculation.stats["head"]
        assert stats.drafted > 120 and stats.accepted > 0.85 * stats.drafted
        kinds = {kind for (_, _, kind), one in decoding.recordings._of.items() if one.graph is not None}
        assert kinds & {*WIDTHS} and decoding.replays > 10
        llm._built.engine.scheduler.check_integrity()


@pytest.mark.parametrize("run", ["as it is", "chunked", "preempted"])
def test_drafts_are_what_the_head_says_and_nobodys_keys_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Of the whole text; entries lie where the row's own blocks are, drafts beyond these in a block of the chain."""
    more: dict[str, Any] = {
        "as it is": {}, "chunked": {"max_num_batched_tokens": 20}, "preempted": {"kv_cache_memory": 16 * 2 * 2048},
    }[run]  # fmt: skip
    more |= {"load_format": "dummy", "speculation": "off", "enable_prefix_caching": False}
    model = write_tiny(tmp_path / "model")
    folder = made_eagle(tmp_path / "head", TINY, [0, 1])
    with LLM(model, **OPTIONS, **more) as llm:
        plain = answers(llm, 0.0, 50)
    with LLM(model, **OPTIONS, **more) as llm:
        speculation, _ = on_device(monkeypatch, llm, folder, Unrecorded)
        (head,) = speculation.proposers
        assert isinstance(head, DeviceEagle)
        layer, draft, scheduler, state = head._head.run, head.draft, llm._built.engine.scheduler, runner_of(llm).state
        said: dict[tuple[int, ...], list[int]] = {}

        def watched(entering: Any, ids: Any, positions: Any, slots: Any, attention: Any) -> torch.Tensor:
            used = {block for one in scheduler.running for block in one.blocks}
            held = {block for block in (slots[slots >= 0] // state.block_size).tolist() if block < state.num_blocks}
            assert held <= used
            return layer(entering, ids, positions, slots, attention)

        def noted(verified: Verified) -> None:
            draft(verified)
            for row, position in zip(verified.rows.tolist(), verified.positions.tolist(), strict=True):
                if row != state.scratch_row:
                    said[tuple(state.tokens[row, : position + 1].tolist())] = state.drafts[row].tolist()

        monkeypatch.setattr(head._head, "run", watched)
        monkeypatch.setattr(head, "draft", noted)
        assert answers(llm, 0.0, 50) == plain
        assert speculation.stats["head"].drafted > 200
        assert run != "preempted" or scheduler.stats.preemptions
        monkeypatch.setattr(head._head, "run", layer)
        texts = [text for text in sorted(said) if len(text) < 120][::9]
        assert len(texts) > 20
        for text in texts:
            assert said[text] == chain(llm, head._head, text)[:4]
