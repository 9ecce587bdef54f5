"""The same engine on a GPU: tokens equal the CPU's, memory stays within the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpu") / "llama"
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=4096, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def mix() -> tuple[list[list[int]], list[SamplingParams]]:
    """Long and short prompts, shared prefixes, greedy and sampled, more than fits in one step."""
    prompts, params = [], []
    shared = [(13 * i) % 4000 for i in range(300)]
    for number in range(40):
        prompts.append(shared[: (number * 37) % 300] + [(number * 7 + i) % 4000 for i in range(1 + number * 5)])
        params.append(
            SamplingParams(
                temperature=[0.0, 0.9][number % 2], top_p=[1.0, 0.9][number // 2 % 2], top_k=[0, 50][number // 4 % 2],
                seed=number, max_tokens=48, ignore_eos=True, detokenize=False, n=[1, 1, 1, 3][number % 4],
                repetition_penalty=[1.0, 1.1][number // 8 % 2],
            )
        )  # fmt: skip
    return prompts, params


def answers(model: str, **options: Any) -> list[list[int]]:
    with LLM(model, dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=512, **options) as llm:
        prompts, params = mix()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm._front.engine.scheduler.check_integrity()
        return [one.token_ids for output in outputs for one in output.outputs]


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(theirs)


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
