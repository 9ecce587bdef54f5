"""Engines whose ranks are processes that divide a model say what one rank says: packed, recorded, routed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rank_groups import said
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError
from tokenmill.ops.native import library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as tests/parallel/test_rank_group.py")

MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 515, "attention_bias": True, "tie_word_embeddings": True,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9], [20, 21, 22], [30 + i for i in range(40)], [7]]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 6},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "logit_bias": {9: 1.0}, "seed": 7},
]
ANSWERS = [SamplingParams(max_tokens=16, ignore_eos=True, **kind) for kind in KINDS]


def opened(model: str, parallel: str | None, **options: Any) -> LLM:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4}
    settings |= {"max_model_len": 128, "kv_cache_memory": 1 << 22, "speculation": "off"}
    return LLM(model, parallel=parallel, **settings | options)


@pytest.mark.skipif(isinstance(library.load(), str), reason="there is no native library")
def test_packed_weights_and_recorded_steps(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Some with settings, some all greedy, which are chosen inside of the recording."""
    model, greedy = write_tiny(tmp_path / "dense", **MODELS["dense"]), [ANSWERS[0]] * len(PROMPTS)

    def answers(llm: LLM) -> list[Any]:
        return [said(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (ANSWERS, greedy)]

    with opened(model, None) as one:
        wanted = answers(one)
    with opened(model, "tp2") as llm:
        assert answers(llm) == wanted
        runner = llm._built.engine.runner.runner
        assert runner._recorded._graph is not None
        assert runner.sampler.part.ranks.counts["all_reduce"] > 16 * 5
    assert not [one for one in recwarn if "cannot be recorded" in str(one.message)]


@pytest.mark.skipif(isinstance(library.load(), str), reason="there is no native library")
def test_rounded_weights_say_nearly_the_same(tmp_path: Path) -> None:
    """Inputs of products are rounded, too: what differs in the last bit may become the next of 8-bit numbers."""
    model = write_tiny(tmp_path / "dense", **MODELS["dense"])
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    for layout in (None, "tp2"):
        with opened(model, layout, quantization="int8") as llm:
            outputs = llm.generate(PROMPTS[2:3], asked, use_tqdm=False)
            found.append([next(iter(one.values())).logprob for one in outputs[0].prompt_logprobs[1:]])
    assert found[1] == pytest.approx(found[0], abs=0.05) and len(found[0]) == len(PROMPTS[2]) - 1


def test_four_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    model, found = write_tiny(tmp_path / "dense", **MODELS["dense"]), []
    params = [SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1, **kind) for kind in KINDS]
    for layout in (None, "tp4"):
        with opened(model, layout, batch_invariant=True) as llm:
            found.append(said(llm.generate(PROMPTS, params, use_tqdm=False)))
    assert found[0] == found[1]


def test_whole_experts_on_two_ranks_and_hot_ones_on_both(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "moe", **MODELS["moe"])
    with opened(model, None, dtype="float64") as one:
        wanted = said(one.generate(PROMPTS, ANSWERS, use_tqdm=False))
    with opened(model, "ep2", dtype="float64", hot_experts="1,6") as llm:
        assert said(llm.generate(PROMPTS, ANSWERS, use_tqdm=False)) == wanted
        load = llm._built.engine.runner.runner.decoder.expert_load
        assert load is not None and int(load.counts.sum()) % 3 == 0 < int(load.counts.sum())


def test_sums_in_eight_bits_stay_near_and_small_ones_exact(tmp_path: Path) -> None:
    """A prompt's sums are long enough, those of single rows are not."""
    model = write_tiny(tmp_path / "dense", **MODELS["dense"])
    asked, found = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0), []
    above = 20 * 128 * 4  # bytes: more than 20 rows
    for options in ({}, {"allreduce_8bit_above": above}, {"allreduce_8bit_above": 1 << 30}):
        with opened(model, "tp2", **options) as llm:
            output = llm.generate(PROMPTS[2:3], asked, use_tqdm=False)[0]
            ranks = llm._built.engine.runner.runner.decoder.ranks.counts
            found.append([next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]])
        layers = 2
        assert ranks["all_to_all"] == (1 + 2 * layers if options.get("allreduce_8bit_above") == above else 0)
    exact, near, too_small = found
    assert too_small == exact != near and near == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("dense", {"parallel": "tp3"}, "its 4 attention heads are no multiple of 3; tp may be 1, 2, 4"),
        ("dense", {"parallel": "ep2"}, "LlamaForCausalLM has no experts to divide among 2 ranks; leave ep out"),
        ("moe", {"parallel": "ep2", "hot_experts": "3,8"}, "hot_experts names expert 8"),
        ("moe", {"hot_experts": "3"}, "no rank lacks any expert"),
        ("moe", {"hot_experts": "three"}, "hot_experts is 'three'; it must be numbers of experts"),
        ("dense", {"expert_capacity": 1.5}, "expert_capacity is 1.5, but LlamaForCausalLM has no experts"),
        ("moe", {"expert_capacity": 1.5, "batch_invariant": True}, "batch_invariant is set, which it breaks"),
        ("moe", {"parallel": "ep2", "batch_invariant": True}, "add them up in another order"),
        ("dense", {"allreduce_8bit_above": 1}, "allreduce_8bit_above is 1, but no ranks divide heads .tp."),
        ("dense", {"parallel": "tp2", "allreduce_8bit_above": 1, "batch_invariant": True}, "promises the exact sum"),
        ("dense", {"parallel": "tp2", "allreduce_8bit_above": 0}, "must be a positive whole number, or unset"),
    ],
)
def test_wishes_that_cannot_be_followed_are_refused_in_a_sentence(
    name: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = write_tiny(tmp_path / name, **MODELS[name])
    with pytest.raises(ConfigError, match=told):
        opened(model, **{"parallel": None, **options})
