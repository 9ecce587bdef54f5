"""The answer does not depend on how it was computed: batching, chunking, caching, preemption, overlap, block size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams

PLAIN: dict[str, Any] = {
    "max_num_seqs": 1,
    "overlap": False,
    "enable_prefix_caching": False,
    "block_size": 16,
    "max_num_batched_tokens": 512,
}

# Every way a user might run the same requests. float64 makes rounding differences between batch shapes
# (about 1e-15) far smaller than any gap between logits, so equal means equal.
VARIANTS: dict[str, dict[str, Any]] = {
    "one row, synchronous": {},
    "64 rows": {"max_num_seqs": 64},
    "64 rows, one step behind": {"max_num_seqs": 64, "overlap": True},
    "prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": True, "overlap": True},
    "chunks of 16": {"max_num_seqs": 16, "max_num_batched_tokens": 16, "overlap": True},
    "block size 8": {"max_num_seqs": 16, "block_size": 8, "enable_prefix_caching": True},
    "block size 32": {"max_num_seqs": 16, "block_size": 32, "overlap": True},
    # 512 tokens of memory for requests that want up to 160 each, 16 at a time
    "memory too small": {"max_num_seqs": 16, "block_size": 8, "max_model_len": 256, "blocks": 32, "overlap": True},
    "memory too small, cached": {
        "max_num_seqs": 16,
        "block_size": 8,
        "max_model_len": 256,
        "blocks": 32,
        "enable_prefix_caching": True,
    },
    "reference ops": {"max_num_seqs": 8, "ops": "reference", "overlap": True},
}


def open_llm(model: str, **options: Any) -> LLM:
    settings = PLAIN | options
    blocks = settings.pop("blocks", None)
    if blocks is not None:  # two layers, keys and values, two heads of 8 in float64
        settings["kv_cache_memory"] = blocks * settings["block_size"] * 2 * 2 * 2 * 8 * 8
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, dtype="float64", device="cpu", **settings)


@pytest.fixture(scope="module")
def engines(tiny_model: str) -> dict[str, LLM]:
    return {name: open_llm(tiny_model, **options) for name, options in VARIANTS.items()}


token = st.integers(3, 127)


@st.composite
def request_mixes(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that partly share prefixes, with greedy and seeded sampling and every logit shaper."""
    shared = draw(st.lists(token, min_size=40, max_size=70))
    mix = []
    for _ in range(draw(st.integers(2, 20))):
        prompt = shared[: draw(st.integers(0, len(shared)))] + draw(st.lists(token, min_size=1, max_size=50))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
            top_k=draw(st.sampled_from([0, 0, 5, 40])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
            logit_bias=draw(st.sampled_from([None, None, {5: 3.0, 9: -100.0}])),
            seed=draw(st.integers(0, 2**32)),
            max_tokens=draw(st.integers(1, 40)),
            min_tokens=0,
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([None, [7, 8]])),
            logprobs=draw(st.sampled_from([None, None, 2])),
            n=draw(st.sampled_from([1, 1, 1, 3])),
            detokenize=False,
        )
        mix.append((prompt, params))
    return mix


def answers(llm: LLM, mix: list[tuple[list[int], SamplingParams]]) -> list[list[tuple[list[int], str | None]]]:
    outputs = llm.generate([prompt for prompt, _ in mix], [params for _, params in mix], use_tqdm=False)
    llm._processor.engine.scheduler.check_integrity()
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(mix=request_mixes())
def test_tokens_do_not_depend_on_how_they_are_computed(
    engines: dict[str, LLM], mix: list[tuple[list[int], SamplingParams]]
) -> None:
    expected = answers(engines["one row, synchronous"], mix)
    for name, llm in engines.items():
        assert answers(llm, mix) == expected, name
        if llm.config.enable_prefix_caching:
            assert answers(llm, mix) == expected, f"{name}, warm"
            llm.reset_prefix_cache()


def test_small_memory_really_preempts(engines: dict[str, LLM]) -> None:
    """Guards the test above: its small pools must be small."""
    mix = [([5 + i] * 60, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for i in range(12)]
    before = engines["memory too small"]._processor.engine.scheduler.stats.preemptions
    assert answers(engines["memory too small"], mix) == answers(engines["one row, synchronous"], mix)
    assert engines["memory too small"]._processor.engine.scheduler.stats.preemptions > before


def test_a_warm_prefix_cache_is_used_and_changes_nothing(engines: dict[str, LLM]) -> None:
    llm = engines["prefix cache"]
    llm.reset_prefix_cache()
    prompt = [(7 * i) % 120 + 3 for i in range(100)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    cold = llm.generate([prompt], params, use_tqdm=False)[0]
    warm = llm.generate([prompt], params, use_tqdm=False)[0]
    other = llm.generate([prompt], params, use_tqdm=False, cache_salt="another tenant")[0]
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 96 and other.num_cached_tokens == 0
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == other.outputs[0].token_ids


def test_logprobs_do_not_depend_on_how_they_are_computed(engines: dict[str, LLM]) -> None:
    prompt = [(11 * i) % 120 + 3 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    expected = None
    for name, llm in engines.items():
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        found = [
            {token: entry.logprob for token, entry in table.items()}
            for table in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            if table is not None
        ]
        expected = expected or found
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9), name
