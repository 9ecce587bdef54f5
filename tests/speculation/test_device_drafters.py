"""Draft models and early layers on a device that is behind the host: recorded, overlapped, and no token changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[1])]
from fake_graphs import FakeRecorder
from test_drafts_on_device import FakeStaging, Graphs, Unrecorded, behind_the_host, runner_of
from tiny import write_tiny
from tiny_drafts import made_head, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.drafters import Verified
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation import speculation as speculation_module
from tokenmill.engine.speculation.choose import draft_model_for, speculation_for
from tokenmill.engine.speculation.device_budget import DeviceBudget
from tokenmill.engine.speculation.device_draft_model import DeviceDraftModel
from tokenmill.engine.speculation.head import DeviceHead
from tokenmill.engine.speculation.speculation import DraftStats, Speculation
from tokenmill.engine.step import DRAFTED, Step
from tokenmill.errors import ConfigError
from tokenmill.model.decoder import Decoder
from tokenmill.quant.schemes.choose import ComputeTarget

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8, "ops": "reference",
    "cuda_graphs": False, "max_model_len": 128, "overlap": True,
}  # fmt: skip
PROMPTS = [[3 + (7 * i + j) % 120 for j in range(4 + 9 * i)] for i in range(4)]
# Of requests that run together
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 20, "seed": 7}]
RUNS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in turns": {"overlap": False},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"kv_cache_memory": 14 * 4096},  # of 4096 bytes a block
    "int8 keys": {"kv_cache_dtype": "int8"},
    "no cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("stranger"), hidden_size=16, head_dim=4, num_hidden_layers=1)


class Recorded(Graphs):
    """What the device drafted is verified by the replay that follows, and not by the recording."""

    def _record(self, *args: Any) -> None:
        before = self._state.drafts.clone()
        super()._record(*args)
        self._state.drafts.copy_(before)


def drafting(
    llm: LLM, speculation: str, monkeypatch: pytest.MonkeyPatch, rests: float = 0.0, recorded: bool = False
) -> Speculation:
    """Have an engine on a CPU draft as on a GPU, up to DRAFTED tokens in all but a share of its steps.

    Recorded: here a replay takes longer than a step that is computed anew.
    """
    make_drafts_free(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    monkeypatch.setattr(choose, "ASYNC_DEVICES", {"cpu"})
    monkeypatch.setattr(Decoder, "recordable", True)
    dice = Random(3)

    def turn(self: DeviceBudget, rows: int, most: int, branches: bool = False) -> int:
        return 0 if dice.random() < rests else min(DRAFTED if dice.random() < 0.6 else 1, most // rows - 1)

    monkeypatch.setattr(DeviceBudget, "turn", turn)
    monkeypatch.setattr(DeviceBudget, "rests", lambda *_: False)
    runner, config = runner_of(llm), replace(llm.config, speculation=speculation)
    behind_the_host(monkeypatch, runner)
    graphs = Recorded if recorded else Unrecorded
    runner._graphs = graphs(runner.decoder, runner.state, runner.sampler, 8 * (1 + DRAFTED))
    runner.decode_paths = [runner._graphs]
    target = ComputeTarget(runner.device, torch.float32)
    draft = draft_model_for(config, llm._built.spec, None, target, torch.float32, lambda *_: None)
    made, _ = speculation_for(config, runner, True, 8 * (1 + DRAFTED), draft)
    assert made is not None
    llm._built.engine.speculation = made
    llm._built.engine.scheduler.limits = replace(llm._built.engine.scheduler.limits, max_verified=8 * (1 + DRAFTED))
    return made


def answers(llm: LLM, tokens: int = 40, n: int = 1, fails: int = 0) -> list[list[int]]:
    ways = [WAYS[i % 2] for i in range(len(PROMPTS))]
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, n=n, **way) for way in ways]
    found = []
    for _ in range(2):  # the second time with a warm prefix cache
        outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
        assert all(one.error is None for one in outputs)
        found += [list(one.token_ids) for output in outputs for one in output.outputs]
    llm._built.engine.scheduler.check_integrity()
    assert llm._built.engine.scheduler.stats.failed_steps == fails
    return found


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[Any]:
    known: dict[tuple[bool, int], list[list[int]]] = {}

    def of(run: str = "as it is", n: int = 1) -> list[list[int]]:
        name = run == "int8 keys", n
        if name not in known:
            with LLM(model, **(OPTIONS | (RUNS[run] if name[0] else {}))) as llm:
                known[name] = answers(llm, n=n)
        return known[name]

    yield of


def held(speculation: Speculation) -> DraftStats:
    (stats,) = (one for name, one in speculation.stats.items() if one.drafted)
    return stats


@pytest.mark.parametrize("run", RUNS)
def test_a_model_that_drafts_for_itself_is_nearly_always_right(
    model: str, plain: Any, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Its keys and values are where they should be, whatever the host knew when it launched a step."""
    with LLM(model, **(OPTIONS | RUNS[run])) as llm:
        speculation = drafting(llm, f"draft:{model}", monkeypatch, rests=0.1, recorded=run == "as it is")
        assert answers(llm) == plain(run)
        engine = llm._built.engine
        assert run != "preempted" or engine.scheduler.stats.preemptions
        assert run == "no cache" or engine.scheduler.kv.stats.hit
        graphs = runner_of(llm)._graphs
        assert graphs is not None and (graphs.replays if run == "as it is" else graphs.plain_runs) > 20
    stats = held(speculation)
    least = 0.95 if run != "int8 keys" else 0.8
    assert stats.drafted > 100 and stats.accepted > least * stats.drafted


@pytest.mark.parametrize("proposer", ["stranger", "layers", "suffix and itself"])
def test_drafts_of_any_quality_change_no_token(
    model: str, stranger: str, plain: Any, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    asked = {"stranger": f"draft:{stranger}", "layers": "layers:1", "suffix and itself": f"suffix,draft:{model}"}
    with LLM(model, **OPTIONS) as llm:
        speculation = drafting(llm, asked[proposer], monkeypatch, rests=0.1, recorded=proposer == "layers")
        for future in speculation.coming:
            future.result()
        assert answers(llm, n=2) == plain(n=2)
    assert sum(one.drafted for one in speculation.stats.values()) > 200


@pytest.mark.parametrize("run", ["as it is", "preempted"])
@pytest.mark.parametrize("proposer", ["draft", "layers"])
def test_drafts_leave_keys_in_nobody_elses_blocks(
    model: str, monkeypatch: pytest.MonkeyPatch, proposer: str, run: str
) -> None:
    """Not even where a row's table still names those of the requests that had the row before."""
    with LLM(model, **(OPTIONS | RUNS[run])) as llm:
        speculation = drafting(llm, f"draft:{model}" if proposer == "draft" else "layers:1", monkeypatch)
        runner = runner_of(llm)
        drafter = speculation.proposers[-1]
        arenas = [runner.state.arena]
        if isinstance(drafter, DeviceDraftModel):
            arenas.append(drafter._runner.state.arena)
        launch, changed = runner.launch, 0

        def watched(step: Step) -> Any:
            nonlocal changed
            before = [arena.clone() for arena in arenas]
            pending = launch(step)
            own = {block for request in step.requests for block in request.blocks}
            for arena, then in zip(arenas, before, strict=True):
                found = (arena != then).movedim(2, 0).flatten(1).any(1).nonzero().flatten().tolist()
                assert {*found} <= own
                changed += len(found)
            return pending

        monkeypatch.setattr(runner, "launch", watched)
        prompts = [{"prompt_token_ids": [3 + (5 * i + j) % 99 for j in range(1 + 7 * i % 40)]} for i in range(20)]
        params = [SamplingParams(max_tokens=5 + 11 * i % 37, temperature=0.0, ignore_eos=True) for i in range(20)]
        assert all(one.error is None for one in llm.generate(prompts, params, use_tqdm=False))
        assert llm._built.engine.scheduler.stats.failed_steps == 0
    assert changed > 200 and held(speculation).accepted > 20


def test_without_spare_blocks_rows_keep_what_they_have(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is preempted for the room of drafts."""
    preempted = []
    for speculation in (None, f"draft:{model}"):
        with LLM(model, **(OPTIONS | {"kv_cache_memory": 19 * 4096})) as llm:
            if speculation is not None:
                drafting(llm, speculation, monkeypatch)
            answers(llm, tokens=36)
            preempted.append(llm._built.engine.scheduler.stats.preemptions)
    assert preempted == [0, 0]


def test_what_others_have_read_is_not_read_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, **OPTIONS) as llm:
        speculation = drafting(llm, f"draft:{model}", monkeypatch)
        drafter = speculation.proposers[-1]
        assert isinstance(drafter, DeviceDraftModel)
        launch, read = drafter._runner.launch, []
        monkeypatch.setattr(drafter._runner, "launch", lambda step: (read.append(step.num_tokens), launch(step))[1])
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        for expected in (range(80, 90), range(0, 20)):
            read.clear()
            llm.generate({"prompt_token_ids": [9 + i % 23 for i in range(80)]}, params, use_tqdm=False)
            assert sum(read) in expected
        llm.reset_prefix_cache()
        read.clear()
        llm.generate({"prompt_token_ids": [9 + i % 23 for i in range(80)]}, params, use_tqdm=False)
        assert sum(read) in range(80, 90)


def test_a_draft_model_that_fails_costs_no_answer(
    model: str, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(model, **OPTIONS) as llm:
        speculation = drafting(llm, f"draft:{model}", monkeypatch)
        drafter = speculation.proposers[-1]
        assert isinstance(drafter, DeviceDraftModel)

        def failing(step: Step) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(drafter._runner, "launch", failing)
        assert answers(llm) == plain()
        assert drafter not in speculation.proposers
    assert "drafts of draft are not used any more: out of memory" in caplog.text


@pytest.mark.parametrize("asked", ["head", "draft"])
def test_a_drafter_that_fails_at_the_end_of_a_step_costs_no_answer(
    model: str,
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
) -> None:
    head = made_head(model, tmp_path / "head.safetensors", OPTIONS)
    with LLM(model, **OPTIONS) as llm:
        speculation = drafting(llm, f"head:{head}" if asked == "head" else f"draft:{model}", monkeypatch)
        drafter, turns = speculation.proposers[-1], 0
        assert isinstance(drafter, DeviceHead | DeviceDraftModel)
        draft = drafter.draft

        def failing(verified: Verified) -> None:
            nonlocal turns
            turns += 1
            if turns == 9:
                raise RuntimeError("out of memory")
            draft(verified)

        monkeypatch.setattr(drafter, "draft", failing)
        assert answers(llm) == plain()
        assert turns == 9 and drafter not in speculation.proposers
    assert f"drafts of {asked} are not used any more: out of memory" in caplog.text


def test_a_head_of_which_nothing_holds_is_switched_off(
    model: str, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits that are no numbers are seen by nobody on a device: what it drafts then just never holds."""
    head = made_head(model, tmp_path / "head.safetensors", OPTIONS)
    monkeypatch.setattr(speculation_module, "NEVER_HELD", 60)
    with LLM(model, **OPTIONS) as llm:
        speculation = drafting(llm, f"head:{head}", monkeypatch)
        drafter = speculation.proposers[-1]
        assert isinstance(drafter, DeviceHead)
        step = drafter._head.step

        def broken(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            state, logits = step(*args)
            return state, logits * torch.nan

        monkeypatch.setattr(drafter._head, "step", broken)
        assert answers(llm) == plain()
        assert drafter not in speculation.proposers and speculation.budget is None and speculation.proposers
        assert answers(llm) == plain()
    assert "drafts of head are not used any more: none of" in caplog.text


def test_steps_that_fail_are_forgotten(model: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model reads again what it had read for steps of which nobody knows how far they came."""
    with LLM(model, **OPTIONS) as llm:
        speculation = drafting(llm, f"draft:{model}", monkeypatch)
        runner = runner_of(llm)
        launch, steps = runner.launch, 0

        def failing(step: Step) -> Any:
            nonlocal steps
            steps += 1
            if steps == 6:
                raise RuntimeError("a broken step")
            return launch(step)

        monkeypatch.setattr(runner, "launch", failing)
        assert answers(llm, fails=1) == plain()
    assert held(speculation).accepted > 0.95 * held(speculation).drafted > 50


def test_one_of_those_that_compute_drafts_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, **OPTIONS) as llm:
        with pytest.raises(ConfigError, match="only one of head, draft and layers drafts on a GPU"):
            drafting(llm, f"layers:1,draft:{model}", monkeypatch)
        with pytest.raises(ConfigError, match="layers:2, but this model has 2"):
            drafting(llm, "layers:2", monkeypatch)
