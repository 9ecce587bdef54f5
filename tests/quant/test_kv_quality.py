"""How far a quantized KV cache moves the predictions of a real model."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
from test_quality import TEXT

from tokenmill import LLM, SamplingParams

# Nats per token of difference, either way, and of change of the mean. The text is short: over many tokens the mean
# changes far less (scripts/perplexity.py measures it).
LIMITS = {"int8": (0.05, 0.02), "fp8": (0.12, 0.04), "int4": (0.4, 0.25)}


def losses(model: str, kv_cache_dtype: str) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(model, device="cpu", max_num_seqs=1, max_model_len=512, ops="cpu", kv_cache_dtype=kv_cache_dtype) as llm:
        output = llm.generate([TEXT], params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [-entry[token].logprob for token, entry in pairs if entry is not None]


@pytest.fixture(scope="module")
def exact(default_model: str) -> list[float]:
    return losses(default_model, "float32")


@pytest.mark.parametrize("form", LIMITS)
def test_quantized_caches_hardly_move_what_a_real_model_predicts(
    form: str, default_model: str, exact: list[float]
) -> None:
    changes = [new - old for new, old in zip(losses(default_model, form), exact, strict=True)]
    either_way, mean = fmean(map(abs, changes)), fmean(changes)
    error = stdev(changes) / math.sqrt(len(changes))
    print(f"{form}: {either_way:.4f} nats either way, {mean:+.4f} in the mean (standard error {error:.4f})")
    assert 1e-4 < either_way < LIMITS[form][0]
    assert abs(mean) < LIMITS[form][1]
