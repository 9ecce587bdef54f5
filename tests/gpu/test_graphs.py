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


def test_steady_decode_hardly_allocates_and_never_waits(checkpoint: str) -> None:
    """Counted by the allocator, and by torch's own check for synchronizing calls while steps are launched."""
    with LLM(checkpoint, device="cuda", skip_tokenizer_init=True, max_num_seqs=16) as llm:
        front = llm._front
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
        for number in range(16):
            front.submit(front.prepare([number + 5] * 20, params))
        for _ in range(40):
            front.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        launch = front.engine.runner.launch

        def watched(step):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        front.engine.runner.launch = watched  # type: ignore[method-assign]
        for _ in range(200):
            front.step()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after - before <= 200  # at most one per step: the cast of new block table entries
