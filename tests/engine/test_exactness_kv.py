"""With a quantized KV cache, too, the answer does not depend on how it was computed; and it is near that of floats."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from test_exactness import answers, request_mixes

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError
from tokenmill.ops.kv_forms import KV_FORMS

FORMS = tuple(KV_FORMS)
ALONE: dict[str, Any] = {"max_num_seqs": 1, "overlap": False, "enable_prefix_caching": False, "block_size": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "one row, synchronous": {},
    "16 rows, one step behind": {"max_num_seqs": 16, "overlap": True},
    "prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": True, "overlap": True},
    "chunks of 16": {"max_num_seqs": 16, "max_num_batched_tokens": 16, "block_size": 8},
    "memory too small, cached": {
        "max_num_seqs": 16, "block_size": 8, "max_model_len": 256, "blocks": 32, "enable_prefix_caching": True,
    },
    "reference ops": {"max_num_seqs": 8, "ops": "reference", "overlap": True},
}  # fmt: skip


def open_llm(model: str, **options: Any) -> LLM:
    chosen = ALONE | options
    blocks = chosen.pop("blocks", None)
    if blocks is not None:  # two layers, keys and values, two heads of 8
        head_bytes = KV_FORMS[chosen["kv_cache_dtype"]].head_bytes(8)
        chosen["kv_cache_memory"] = blocks * chosen["block_size"] * 2 * 2 * 2 * head_bytes
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, dtype="float64", device="cpu", **chosen)


def changed(model: str, folder: Path, **changes: Any) -> str:
    """Another folder with the config of a model, changed."""
    folder.mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@pytest.fixture(scope="module", params=FORMS)
def engines(tiny_model: str, request: pytest.FixtureRequest) -> dict[str, LLM]:
    form = request.param
    return {name: open_llm(tiny_model, kv_cache_dtype=form, **options) for name, options in VARIANTS.items()}


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(mix=request_mixes())
def test_tokens_do_not_depend_on_how_they_are_computed_with_quantized_kv(
    engines: dict[str, LLM], mix: list[tuple[list[int], SamplingParams]]
) -> None:
    expected = answers(engines["one row, synchronous"], mix)
    for name, llm in engines.items():
        assert answers(llm, mix) == expected, name
        if llm.config.enable_prefix_caching:
            assert answers(llm, mix) == expected, f"{name}, warm"
            llm.reset_prefix_cache()


def test_preempted_requests_go_on_with_equal_tokens(engines: dict[str, LLM]) -> None:
    small = engines["memory too small, cached"]
    mix = [([5 + i] * 60, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)) for i in range(12)]
    before = small._processor.engine.scheduler.stats.preemptions
    assert answers(small, mix) == answers(engines["one row, synchronous"], mix)
    assert small._processor.engine.scheduler.stats.preemptions > before


def test_beams_do_not_depend_on_how_they_are_computed(engines: dict[str, LLM]) -> None:
    """Beams share blocks and copy the last one, scales included."""
    params = SamplingParams(beam_width=3, n=3, max_tokens=12, ignore_eos=True)
    mix = [([(7 * i + start) % 120 + 3 for i in range(21)], params) for start in (0, 1)]
    found = {name: answers(llm, mix) for name, llm in engines.items() if (llm.config.max_num_seqs or 0) > 1}
    assert len(found) == 5 and len({tuple(tokens) for tokens, _ in found["reference ops"][0]}) == 3
    for name, beams in found.items():
        assert beams == found["reference ops"], name


def test_a_warm_prefix_cache_is_used(engines: dict[str, LLM]) -> None:
    llm = engines["prefix cache"]
    llm.reset_prefix_cache()
    prompt, params = [(7 * i) % 120 + 3 for i in range(100)], SamplingParams(temperature=0, max_tokens=20)
    cold, warm = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 96)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def prompt_logprobs(llm: LLM) -> list[float]:
    prompt = [(11 * i) % 120 + 3 for i in range(60)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    tables = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    assert tables is not None
    return [table[token].logprob for token, table in zip(prompt[1:], tables[1:], strict=True) if table is not None]


def test_the_answer_is_near_that_of_a_cache_of_floats_and_not_equal(engines: dict[str, LLM], tiny_model: str) -> None:
    """If it were equal, something would read keys that were never rounded."""
    exact = prompt_logprobs(open_llm(tiny_model))
    llm = engines["16 rows, one step behind"]
    error = fmean(abs(a - b) for a, b in zip(prompt_logprobs(llm), exact, strict=True))
    assert 1e-4 < error < {"int8": 0.02, "fp8": 0.08, "int4": 0.2}[llm.config.kv_cache_dtype]


@pytest.mark.parametrize("form", FORMS)
def test_the_memory_plan_counts_codes_and_scales(form: str, tiny_model: str, tmp_path: Path) -> None:
    model = changed(tiny_model, tmp_path / "wide", head_dim=64)
    with open_llm(model, kv_cache_dtype=form) as llm, open_llm(model) as plain:
        state = llm._processor.engine.runner.state
        assert state.scales is not None and state.arena.element_size() == state.scales.element_size() - 1 == 1
        assert llm._built.settings.memory.kv == state.arena.nbytes + state.scales.nbytes
        assert any(line.startswith(f"kv cache     {form} (") for line in llm.plan_lines())
        per_token = [x._built.settings.memory.kv / x._built.settings.num_blocks for x in (llm, plain)]
        halves = per_token[1] / 4  # what float16 would take
        assert 1 - per_token[0] / halves == pytest.approx({"int8": 0.484, "fp8": 0.484, "int4": 0.688}[form], abs=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_batch_invariance_holds_with_quantized_kv(form: str, tiny_model: str) -> None:
    """Equal bits of log-probabilities alone and in company."""
    chosen = ALONE | {"max_num_seqs": 8}
    prompts = [[(7 * i + start) % 120 + 3 for i in range(10 + 9 * start)] for start in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu"}
    with LLM(tiny_model, batch_invariant=True, kv_cache_dtype=form, **options, **chosen) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
            assert alone.token_ids == output.outputs[0].token_ids
            assert alone.logprobs == output.outputs[0].logprobs


def test_models_that_cannot_have_it_are_refused_with_the_reason(tiny_model: str, tmp_path: Path) -> None:
    odd = changed(tiny_model, tmp_path / "odd", head_dim=48)
    with pytest.raises(ConfigError, match="'int4' stores heads of a multiple of 32 channels; this model's have 48"):
        open_llm(odd, kv_cache_dtype="int4")
    open_llm(odd, kv_cache_dtype="int8")
    latent = changed(
        tiny_model, tmp_path / "latent", architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2",
        kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8', but DeepseekV2ForCausalLM caches a latent"):
        open_llm(latent, kv_cache_dtype="fp8")
