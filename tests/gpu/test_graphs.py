"""Recorded decode steps give the tokens of plain ones, with hardly an allocation and no wait in steady state."""

from __future__ import annotations

import pytest
import torch
from gpu_mixes import agreement, answers

from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


def test_replayed_steps_give_the_tokens_of_plain_ones(checkpoint: str) -> None:
    plain = answers(checkpoint, device="cuda", cuda_graphs=False)
    assert agreement(answers(checkpoint, device="cuda", cuda_graphs=True), plain) >= 0.95


def test_a_batch_that_ends_is_replayed_at_sizes_that_are_recorded(checkpoint: str) -> None:
    """64 requests of which 4 end in every step: each size comes up for two steps."""
    prompts = [[number + 5] * (1 + number % 30) for number in range(64)]
    lengths = [12 + number // 4 for number in range(64)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    found, counts = [], []
    for recorded in (False, True):
        options = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "cuda_graphs": recorded}
        with LLM(checkpoint, max_num_seqs=64, max_num_batched_tokens=2048, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            graphs = llm._built.engine.runner._graphs  # type: ignore[attr-defined]
            counts.append((graphs.plain_runs, graphs.replays) if graphs is not None else None)
    assert agreement(found[1], found[0]) >= 0.95
    plain, replays = counts[1] or (0, 0)
    assert replays >= 20 and plain <= 5, counts


def test_steady_decode_hardly_allocates_and_never_waits(checkpoint: str) -> None:
    """Counted by the allocator, and by torch's own check for synchronizing calls while steps are launched."""
    with LLM(checkpoint, device="cuda", skip_tokenizer_init=True, max_num_seqs=16) as llm:
        processor = llm._processor
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
        for number in range(16):
            processor.submit(processor.prepare([number + 5] * 20, params))
        for _ in range(40):
            processor.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launch = processor.engine.runner.launch

        def watched(step):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        processor.engine.runner.launch = watched  # type: ignore[method-assign]
        for _ in range(200):
            processor.step()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after - before <= 200  # at most one per step: the cast of new block table entries
