"""Vectors of prompts on a GPU: those of the CPU, within the memory plan, and no launch waits for the device."""

from __future__ import annotations

import pytest
import torch

from tokenmill import LLM
from tokenmill.engine.step import POOLINGS, Pending, Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
PROMPTS = [[(7 * i + first) % 4000 + 3 for i in range(size)] for first, size in ((0, 900), (9, 1), (5, 300), (2, 64))]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("step_tokens", [128, 2048])
def test_a_vector_is_that_of_the_cpu(checkpoint: str, pooling: str, step_tokens: int) -> None:
    found = []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for device in ("cpu", "cuda"):
        options = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory": 256 << 20, "max_num_seqs": 8}
        with LLM(checkpoint, device=device, max_num_batched_tokens=step_tokens, **options) as llm:
            outputs = llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
            found.append(torch.tensor([one.outputs.embedding for one in outputs]))
            if device == "cuda":
                assert torch.cuda.max_memory_allocated() - before <= llm._built.settings.memory.total
    assert (found[0] * found[1]).sum(1).min() > 0.999  # the cosines of their angles


@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_launch_waits(checkpoint: str, pooling: str) -> None:
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    with LLM(checkpoint, device="cuda", enable_prefix_caching=False, **options) as llm:
        for _ in range(4):  # whatever is recorded is recorded now
            llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
        runner = llm._built.engine.runner
        launch = runner.launch

        def watched(step: Step) -> Pending:
            torch.cuda.set_sync_debug_mode("error")  # the engine takes an error for a failed step
            try:
                return launch(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = watched  # type: ignore[method-assign]
        outputs = llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
        assert not any(one.error for one in outputs)
        assert llm._built.engine.scheduler.stats.failed_steps == 0
