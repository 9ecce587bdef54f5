"""The same engine on a GPU: tokens equal the CPU's, memory stays within the plan."""

from __future__ import annotations

import pytest
import torch
from gpu_mixes import agreement, answers, mix

from tokenmill import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


def test_gpu_tokens_equal_cpu_tokens(checkpoint: str) -> None:
    """float32 sums in another order, so a near-tie may fall the other way; all but a few must be equal."""
    expected = answers(checkpoint, device="cpu")
    assert agreement(answers(checkpoint, device="cuda"), expected) >= 0.95
    assert agreement(answers(checkpoint, device="cuda", ops="reference"), expected) >= 0.95
    assert agreement(answers(checkpoint, device="cuda", overlap=False, max_num_seqs=8), expected) >= 0.95
    assert agreement(answers(checkpoint, device="cuda", kv_cache_memory=96 << 20), expected) >= 0.95


def test_memory_stays_within_the_plan(checkpoint: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with LLM(checkpoint, device="cuda", skip_tokenizer_init=True, kv_cache_memory=1 << 30) as llm:
        prompts, params = mix()
        llm.generate(prompts * 8, params * 8, use_tqdm=False)
        assert torch.cuda.max_memory_allocated() - before <= llm._built.settings.memory.total
