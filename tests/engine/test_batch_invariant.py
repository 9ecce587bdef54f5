"""In batch-invariant mode a request gets the same bits, tokens and log-probabilities, whatever runs beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError
from tokenmill.ops.native import library

FIXTURES = Path(__file__).parents[1] / "weights" / "data"
sys.path.append(str(FIXTURES.parent))

# A request alone, with its prompt in one piece and nothing remembered of it.
ALONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "overlap": False,
    "enable_prefix_caching": False,
    "block_size": 16,
    "max_num_batched_tokens": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "64 rows": {"max_num_seqs": 64},
    "64 rows, one step behind, cached": {"max_num_seqs": 64, "overlap": True, "enable_prefix_caching": True},
    "plain steps": {"max_num_seqs": 16, "cuda_graphs": False},
    "chunks of 16": {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    "chunks of 7 and 32-token blocks": {"max_num_seqs": 5, "max_num_batched_tokens": 7, "block_size": 32},
    "memory too small": {"max_num_seqs": 16, "block_size": 8, "max_model_len": 256, "blocks": 32},
    "memory too small, cached": {
        "max_num_seqs": 16,
        "block_size": 8,
        "max_model_len": 256,
        "blocks": 32,
        "enable_prefix_caching": True,
        "overlap": True,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    # Sizes that are no multiple of anything, tied embeddings, a bias.
    "odd": {
        "hidden_size": 44,
        "intermediate_size": 53,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "vocab_size": 131,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 40,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
MODELS |= {"llama-64": {"intermediate_size": 64}, "deepseek-v2": DEEPSEEK | {"intermediate_size": 64}}
MODELS["qwen3-moe-32"] = MODELS["qwen3-moe"] | {"moe_intermediate_size": 32}
FLOATS, HALVES = 2 * 2 * 2 * 8 * 4, 2 * 2 * 2 * 8 * 2  # bytes of a token's keys and values
LATENT = 2 * (24 + 8)  # elements
# A model, the bytes of a token in its cache, and how it is opened.
SUBJECTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", FLOATS, {}),
    "odd": ("odd", 2 * 2 * 10 * 4, {}),
    "gemma2": ("gemma2", FLOATS, {}),
    "qwen3-moe": ("qwen3-moe", FLOATS, {}),
    "qwen3-moe in torch": ("qwen3-moe", FLOATS, {"ops": dict.fromkeys(("attention", "route", "act_mul"), "invariant")}),
    "llama, int8": ("llama-64", HALVES, {"quantization": "int8"}),
    "llama, int4, a cache of codes": ("llama-64", 80, {"quantization": "int4", "kv_cache_dtype": "int8"}),
    "qwen3-moe, int4": ("qwen3-moe-32", HALVES, {"quantization": "int4"}),
    "deepseek-v2": ("deepseek-v2", LATENT * 4, {}),
    "deepseek-v2, int8": ("deepseek-v2", LATENT * 2, {"quantization": "int8"}),
    "deepseek-v2, w8a8": ("deepseek-v2", LATENT * 2, {"quantization": "w8a8"}),
}
NATIVE = {name for name in SUBJECTS if "int" in name or "w8a8" in name or "deepseek" in name}
needs_native = pytest.mark.skipif(isinstance(library.load(), str), reason="there is no native library")


def open_llm(model: str, dtype: str = "float32", token_bytes: int = FLOATS, **options: Any) -> LLM:
    chosen = ALONE | {"batch_invariant": True} | options
    blocks = chosen.pop("blocks", None)
    if blocks is not None:
        chosen["kv_cache_memory"] = blocks * chosen["block_size"] * token_bytes
    if not Path(model).is_relative_to(FIXTURES) and Path(model).suffix != ".gguf":
        chosen["load_format"] = "dummy"
    return LLM(model, skip_tokenizer_init=True, dtype=dtype, device="cpu", **chosen)


Engines = tuple[LLM, dict[str, LLM]]


def write_model(tiny_model: str, folder: Path, name: str) -> str:
    """The tiny model with the changes of MODELS; returns its folder."""
    config = json.loads((Path(tiny_model) / "config.json").read_text()) | MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def marked(name: str) -> Any:
    return pytest.param(name, marks=needs_native if name in NATIVE else ())


@pytest.fixture(scope="module", params=[marked(name) for name in SUBJECTS])
def engines(request: pytest.FixtureRequest, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    name, token_bytes, options = SUBJECTS[request.param]
    model = write_model(tiny_model, tmp_path_factory.mktemp("invariant"), name)
    options = options | {"token_bytes": token_bytes}
    return open_llm(model, **options), {one: open_llm(model, **options | way) for one, way in VARIANTS.items()}


token = st.integers(3, 127)


@st.composite
def request_mixes(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that partly share prefixes, greedy and sampled, most with log-probabilities."""
    shared = draw(st.lists(token, min_size=40, max_size=70))
    mix = []
    for _ in range(draw(st.integers(2, 20))):
        prompt = shared[: draw(st.integers(0, len(shared)))] + draw(st.lists(token, min_size=1, max_size=50))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
            top_k=draw(st.sampled_from([0, 0, 5])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
            seed=draw(st.integers(0, 2**32)),
            max_tokens=draw(st.integers(1, 30)),
            ignore_eos=draw(st.booleans()),
            logprobs=draw(st.sampled_from([None, 0, 3])),
            prompt_logprobs=draw(st.sampled_from([None, None, 1])),
            n=draw(st.sampled_from([1, 1, 1, 2])),
            detokenize=False,
        )
        mix.append((prompt, params))
    return mix


def answers(llm: LLM, mix: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Tokens, and the bits of every log-probability."""
    outputs = llm.generate([prompt for prompt, _ in mix], [params for _, params in mix], use_tqdm=False)
    llm._processor.engine.scheduler.check_integrity()
    return [
        ([(one.token_ids, bits(one.logprobs)) for one in output.outputs], bits(output.prompt_logprobs))
        for output in outputs
    ]


def bits(tables: Any) -> Any:
    if tables is None:
        return None
    return [
        None if table is None else {token: entry.logprob.hex() for token, entry in table.items()} for table in tables
    ]


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(mix=request_mixes())
def test_bits_do_not_depend_on_what_runs_beside_a_request(
    engines: Engines, mix: list[tuple[list[int], SamplingParams]]
) -> None:
    alone, others = engines
    expected = [answers(alone, [one])[0] for one in mix]
    for name, llm in others.items():
        assert answers(llm, mix) == expected, name
        if llm.config.enable_prefix_caching:
            assert answers(llm, mix) == expected, f"{name}, warm"
            llm.reset_prefix_cache()


def test_the_variants_do_what_they_are_named_for(engines: Engines) -> None:
    """Guards the test above: small pools must preempt, and warm caches must be hit."""
    alone, others = engines
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, detokenize=False)
    mix = [([5 + i] * 60, params) for i in range(12)]
    small = others["memory too small"]
    before = small._processor.engine.scheduler.stats.preemptions
    assert answers(small, mix) == [answers(alone, [one])[0] for one in mix]
    assert small._processor.engine.scheduler.stats.preemptions > before
    cached = others["64 rows, one step behind, cached"]
    cached.reset_prefix_cache()
    for hit in (0, 48):
        assert cached.generate([mix[0][0]], params, use_tqdm=False)[0].num_cached_tokens == hit


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions_are_invariant_too(dtype: str, tiny_model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
    mix = [([(7 * i * n) % 120 + 3 for i in range(1 + 5 * n)], params) for n in range(18)]
    alone = open_llm(tiny_model, dtype)
    expected = [answers(alone, [one])[0] for one in mix]
    for options in ({"max_num_seqs": 32}, {"max_num_seqs": 8, "max_num_batched_tokens": 13}):
        assert answers(open_llm(tiny_model, dtype, **options), mix) == expected


@needs_native
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "awq", "gptq_desc_act", "w8a8_static", "mixed"])
def test_weights_are_invariant_as_their_files_hold_them(name: str, tmp_path: Path) -> None:
    model = str(FIXTURES / name)
    if name.startswith("Q"):
        gguf = pytest.importorskip("gguf")
        from gguf_files import tiny_model as write_gguf

        model = str(write_gguf(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType[name]))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
    mix = [([(7 * i * n) % 60 + 3 for i in range(1 + 5 * n)], params) for n in range(18)]
    alone = open_llm(model)
    expected = [answers(alone, [one])[0] for one in mix]
    for options in ({"max_num_seqs": 32}, {"max_num_seqs": 8, "max_num_batched_tokens": 13, "cuda_graphs": False}):
        assert answers(open_llm(model, **options), mix) == expected


def test_without_the_mode_bits_do_depend_on_the_batch(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards this file: it notices products that add in another order for several rows, as those of most CPUs do."""
    linear = torch.nn.functional.linear

    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias) if len(x) == 1 else linear(x.flip(-1), weight.flip(-1), bias)

    monkeypatch.setattr(torch.nn.functional, "linear", by_rows)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, detokenize=False)
    mix = [([(7 * i * n) % 120 + 3 for i in range(1 + 5 * n)], params) for n in range(18)]
    alone = open_llm(tiny_model, batch_invariant=False, ops="reference")  # the native library's are
    expected = [answers(alone, [one])[0] for one in mix]
    assert answers(open_llm(tiny_model, batch_invariant=False, ops="reference", max_num_seqs=32), mix) != expected


def test_what_cannot_be_invariant_is_refused(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant.*'fp8'.*leave one of them out"):
        open_llm(tiny_model, quantization="fp8")
    with pytest.raises(ConfigError, match="batch_invariant is 1; it must be True or False"):
        open_llm(tiny_model, batch_invariant=1)
    with pytest.raises(
        ConfigError, match="'int8', whose products depend on the batch on a GPU, and on CPUs without the"
    ):
        open_llm(tiny_model, "bfloat16", quantization="int8")
    with pytest.raises(ConfigError, match="op 'attention' cannot use 'reference': not batch-invariant"):
        open_llm(tiny_model, ops={"attention": "reference"})
    moe = write_model(tiny_model, tmp_path, "qwen3-moe")
    with pytest.raises(ConfigError, match="float64 routes with a product"):
        open_llm(moe, "float64")
    latent = write_model(tiny_model, tmp_path, "deepseek-v2")
    with pytest.raises(ConfigError, match=r"on a CPU in bfloat16 or with other ops .* projects its latent attention"):
        open_llm(latent, "bfloat16")


def test_the_report_says_so(tiny_model: str) -> None:
    report = "\n".join(open_llm(tiny_model, "bfloat16")._built.report)
    assert "dense, batch-invariant" in report and "invariant: attention" in report.replace("act_mul, ", "")


@needs_native
@pytest.mark.parametrize("form", [None, "auto", "w8a8"])
def test_on_a_cpu_the_mode_takes_native_ops_and_recorded_steps(form: str | None, tiny_model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    with open_llm(tiny_model, quantization=form, max_num_seqs=4, speculation="off") as llm:
        llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
        runner = llm._built.engine.runner
        assert runner._recorded._graph is not None
        assert runner.decoder.ops.chosen["attention"].name == "native"
