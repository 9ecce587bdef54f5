"""On a GPU steps with drafts overlap, run from graphs, wait for nothing, and give the tokens of the plain path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[1])]
from test_drafts_on_device import Replay, run
from test_trees_on_device import Grown, Planting, answered
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner.recordings import WIDTHS, Kind
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.device_budget import DeviceBudget
from tokenmill.engine.speculation.head import DeviceHead
from tokenmill.engine.speculation.head_runner import HeadRunner
from tokenmill.engine.step import DRAFTED, Pending, Step
from tokenmill.model.draft_head import DraftHead, Target

pytest.importorskip("triton")
from tokenmill.ops.triton.launch import FIRST_LAUNCHES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


def without_waiting(launch: Callable[[Step], Pending]) -> Callable[[Step], Pending]:
    """The same, but whoever waits for the device in it fails."""

    def launched(step: Step) -> Pending:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return launched


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_change_no_token(tmp_path: Path, wrong: float) -> None:
    model = write_tiny(tmp_path / "model", hidden_size=256, head_dim=64, vocab_size=512, dtype="float32")
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "device": "cuda"}
    with LLM(model=model, max_num_seqs=32, max_model_len=128, enable_prefix_caching=False, **options) as llm:
        engine = llm._built.engine
        runner = engine.runner
        assert isinstance(runner, TorchRunner) and runner._graphs is not None
        plain, steps, _ = run(engine)
        for _ in range(2):  # sizes are recorded when they return
            run(engine, Replay(plain, wrong))
        runner.launch = without_waiting(runner.launch)  # type: ignore[method-assign]
        before = runner._graphs.replays
        drafted, fewer, uncertain = run(engine, Replay(plain, wrong))
        recorded = {kind for (_, _, kind), one in runner._graphs.recordings._of.items() if one.graph is not None}
    assert drafted == plain
    assert uncertain > 10 and recorded & {Kind.DRAFTS, *WIDTHS} and runner._graphs.replays - before > fewer // 2
    assert wrong == 1.0 or fewer < 0.8 * steps


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("warm", [False, True], ids=["greedy", "sampled"])
def test_trees_of_a_head_change_no_token(tmp_path: Path, kv: str, warm: bool) -> None:
    """A head whose matrices are random drafts in recorded steps, so that little of its trees holds."""
    model = write_tiny(tmp_path / "model", hidden_size=256, head_dim=64, vocab_size=512, dtype="float32")
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "device": "cuda"}
    with LLM(
        model=model, max_num_seqs=8 * 17, max_model_len=128, enable_prefix_caching=False, kv_cache_dtype=kv, **options
    ) as llm:
        engine = llm._built.engine
        runner = engine.runner
        assert isinstance(runner, TorchRunner) and runner._graphs is not None
        changes = {"temperature": 0.8} if warm else {}
        plain = answered(engine, None, **changes)
        runner.draft_with(head := random_head(runner), head)
        for _ in range(3):  # sizes are recorded when they return
            grown = Grown(Planting(runner.state, 0.0), plain)
            assert answered(engine, grown, **changes) == plain
        assert grown.trees > 10 and runner.steps_of[Kind.TREES] > 10
        recordings = runner._graphs.recordings._of.items()
        assert any(kind is Kind.TREES and one.graph is not None for (_, _, kind), one in recordings)


def random_head(runner: TorchRunner) -> DeviceHead:
    spec, weights = runner.decoder.spec, runner.decoder.weights
    generator = torch.Generator().manual_seed(3)
    wide, inner, vocab = spec.hidden, 64, 256

    def some(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    head = DraftHead(
        torch.ones(wide), some(wide, wide), torch.ones(2 * wide), some(2 * inner, 2 * wide), some(wide, inner),
        torch.ones(wide), some(2 * inner, wide), some(wide, inner), torch.ones(wide), some(vocab, wide),
        torch.arange(vocab).int(), Target.of(spec, weights.final_norm),
    )  # fmt: skip
    ready = HeadRunner(head, runner.decoder, runner.sampler, False, runner.state.kv)
    return DeviceHead(ready, runner.state, len(runner.state.tokens))


@pytest.mark.parametrize("proposer", ["draft", "layers"])
def test_models_draft_on_the_device_and_nothing_is_compiled_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """The model itself as its own draft model is nearly always right. Nobody waits for the device."""
    model = write_tiny(tmp_path / "model", hidden_size=256, head_dim=64, vocab_size=512, dtype="float32")
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
    options |= {"device": "cuda", "max_num_seqs": 32, "max_model_len": 256}
    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 120 for j in range(4 + 13 * i)]} for i in range(6)]
    ways = [SamplingParams(max_tokens=60, ignore_eos=True, seed=5, temperature=warm) for warm in (0.0, 0.7)]

    def answers(llm: LLM) -> list[list[int]]:
        outputs = [one for params in ways for one in llm.generate(prompts, params, use_tqdm=False)]
        return [list(one.outputs[0].token_ids) for one in outputs]

    with LLM(model=model, speculation="off", **options) as llm:
        plain = answers(llm)
    monkeypatch.setattr(DeviceBudget, "turn", lambda self, rows, most, *_: min(DRAFTED, most // rows - 1))
    monkeypatch.setattr(DeviceBudget, "rests", lambda *_: False)
    with LLM(model=model, speculation=f"draft:{model}" if proposer == "draft" else "layers:1", **options) as llm:
        engine = llm._built.engine
        runner, speculation = engine.runner, engine.speculation
        assert isinstance(runner, TorchRunner) and runner._graphs is not None and speculation is not None
        for one in filter(None, (runner, runner.beside)):
            monkeypatch.setattr(one, "launch", without_waiting(one.launch))
        found = [answers(llm) for _ in range(3)]  # sizes are recorded when they return
        stats = speculation.stats[proposer]
        assert found == [plain] * 3
        assert stats.drafted > 1000 and stats.accepted > (0.9 if proposer == "draft" else 0.0) * stats.drafted
        assert FIRST_LAUNCHES.count == 0 and runner._graphs.replays > 50
