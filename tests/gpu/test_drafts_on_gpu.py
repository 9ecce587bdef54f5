"""On a GPU steps with drafts overlap, run from graphs, wait for nothing, and give the tokens of the plain path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "engine"), str(Path(__file__).parents[1])]
from test_drafts_on_device import Replay, run
from tiny import write_tiny

from tokenmill import LLM
from tokenmill.engine.runner.cuda_graphs import WIDTHS, Kind
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.step import Pending, Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


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
        launch = runner.launch

        def without_waiting(step: Step) -> Pending:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = without_waiting  # type: ignore[method-assign]
        before = runner._graphs.replays
        drafted, fewer, uncertain = run(engine, Replay(plain, wrong))
        recorded = {kind for (_, _, kind), one in runner._graphs.recordings._of.items() if one.graph is not None}
    assert drafted == plain
    assert uncertain > 10 and recorded & {Kind.DRAFTS, *WIDTHS} and runner._graphs.replays - before > fewer // 2
    assert wrong == 1.0 or fewer < 0.8 * steps
