"""A model that overflows in float16 still answers, in float32, and says so; requests beside it notice nothing."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill import LLM, SamplingParams
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.model.weights.names import recipes
from tokenmill.model.widened import WidenedWeights
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Schemes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
HOT = 7  # a token whose residual is beyond float16 after the second layer
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SETTINGS = {"skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4, "max_model_len": 64, "block_size": 8}


@pytest.fixture(scope="module")
def overflowing_model(tmp_path_factory):
    """Token 7 begins at 30,000 in channel 0, and each of the first two layers adds to it what it finds there."""
    folder = tmp_path_factory.mktemp("overflow")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for ways in recipes(spec_from_config(CONFIG)).values():
        for piece in ways[0]:
            tensor = torch.randn(piece.shape, generator=generator) * piece.shape[-1] ** -0.5
            tensors[piece.source] = torch.ones(piece.shape) if len(piece.shape) == 1 else tensor
    embed = tensors["model.embed_tokens.weight"]
    embed[:, 0] = 0.0
    embed[HOT, 0] = 30_000.0
    tensors["lm_head.weight"][:, 0] = 0.0  # whatever channel 0 holds, the other channels decide
    for layer in range(3):  # nobody but the hot token has anything in channel 0, or it would drown what others hold
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0.0
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0.0
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp."
        # The norm makes of channel 0 about sqrt(32); gate and up pass it on, down brings it back as 20,000 and more.
        for name in ("gate_proj", "up_proj"):
            tensors[f"{mlp}{name}.weight"][0] = 0.0
            tensors[f"{mlp}{name}.weight"][0, 0] = 1.0
        tensors[f"{mlp}down_proj.weight"][0, 0] = 800.0
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def answers(model, prompts: list[list[int]], **settings) -> list[tuple[list[int], str | None]]:
    with LLM(str(model), **SETTINGS | settings) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
        return [(list(output.outputs[0].token_ids), output.error) for output in outputs]


def test_an_overflow_is_computed_again_in_float32_and_told(overflowing_model, caplog):
    prompts = [[3, HOT, 9], [11, 12, 13, 14]]
    exact = answers(overflowing_model, prompts, dtype="float32", kv_cache_dtype="float16")
    with caplog.at_level(logging.WARNING, logger="tokenmill.engine"):
        guarded = answers(overflowing_model, prompts, dtype="float16")
    assert guarded[0] == exact[0] and exact[0][1] is None, "what overflowed is what float32 gives"
    assert guarded[1] == answers(overflowing_model, prompts[1:], dtype="float16")[0], "the other is what it is alone"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "layer 1 gives what is no number in float16" in told[0]


def test_widening_matrices_in_parts_changes_no_answer(overflowing_model, monkeypatch):
    prompts = [[3, HOT, 9], [11, 12, 13, 14]]
    exact = answers(overflowing_model, prompts, dtype="float32", kv_cache_dtype="float16")
    monkeypatch.setattr("tokenmill.engine.runner.guard.WIDENED_AT_ONCE", 4 * 32 * 5)  # five rows of most matrices
    assert answers(overflowing_model, prompts, dtype="float16")[0] == exact[0]


def test_a_layers_experts_take_the_room_of_the_one_before():
    spec = spec_from_config(CONFIG | MIXTURE)
    store = dummy_weights(spec, torch.bfloat16, torch.device("cpu"), 0, Schemes(Dense()))
    wide = WidenedWeights(store, 4 * 64 * 7)
    layers = []
    for index in range(spec.num_layers):
        layer, narrow = wide.layer(index), store.layer(index)
        assert torch.equal(layer.mlp.gate_up, narrow.mlp.gate_up.float())
        assert torch.equal(layer.mlp.down, narrow.mlp.down.float())
        x = torch.randn(3, 64)
        expected = torch.nn.functional.linear(x, narrow.attention.qkv.storage["weight"].float())
        assert torch.allclose(layer.attention.qkv(x), expected, atol=1e-5)
        layers.append(layer.mlp)
    assert len({mlp.gate_up.data_ptr() for mlp in layers}) == len({mlp.down.data_ptr() for mlp in layers}) == 1
    assert layers[0].gate_up.data_ptr() != layers[0].down.data_ptr()


def test_without_the_guard_the_request_fails_and_says_why(overflowing_model):
    (tokens, error), (others, fine) = answers(
        overflowing_model, [[3, HOT, 9], [11, 12]], dtype="float16", adaptive_precision=False
    )
    assert not tokens and "not finite" in error and len(others) == 10 and fine is None


def test_an_overflow_amid_an_answer_does_not_lose_what_was_said(overflowing_model):
    """The prompt is fine; the token that overflows comes back as context after a while."""
    bias = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={HOT: 100.0})
    found = []
    for settings in ({"dtype": "float32", "kv_cache_dtype": "float16"}, {"dtype": "float16"}):
        with LLM(str(overflowing_model), **SETTINGS | settings) as llm:
            output = llm.generate([{"prompt_token_ids": [1, 2, 3]}], bias, use_tqdm=False)[0]
            found.append((list(output.outputs[0].token_ids), output.error))
    assert found[0] == found[1] and found[0][0] == [HOT] * 10


def test_chunks_prefix_hits_and_preemption_go_on_in_float32(overflowing_model):
    prompts = [[3, HOT, 9, *range(20, 40)], [3, HOT, 9, *range(20, 41)], list(range(40, 60))]
    exact = answers(overflowing_model, prompts, dtype="float32", kv_cache_dtype="float16")
    small = {"max_num_batched_tokens": 8, "kv_cache_memory": 9 * 8 * 3 * 2 * 2 * 8 * 2}
    guarded = answers(overflowing_model, prompts, dtype="float16", **small)
    assert [one[0] for one in guarded[:2]] == [one[0] for one in exact[:2]]
    assert all(error is None for _, error in guarded)


def test_what_float32_fills_is_shared_with_nobody(overflowing_model):
    """The third prompt begins as the first one, and arrives in the step in which that one begins again."""
    start = list(range(20, 44))
    prompts, lengths = [[*start, HOT, 9], list(range(50, 64)), [*start, 2, 3, 4]], [3, 1, 10]
    params = [replace(GREEDY, max_tokens=length, logprobs=0) for length in lengths]
    found = []
    for chosen in (slice(0, 3), slice(2, 3)):
        with LLM(str(overflowing_model), **SETTINGS | {"dtype": "float16", "max_num_seqs": 2}) as llm:
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts[chosen]]
            last = llm.generate(inputs, params[chosen], use_tqdm=False)[-1]
            assert last.num_cached_tokens == 0
            found.append([{token: one.logprob for token, one in at.items()} for at in last.outputs[0].logprobs])
    assert found[0] == found[1], "the other is what it is alone, to the last bit"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=2),
        SamplingParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True),
    ],
    ids=["several answers", "log-probabilities of the prompt", "beams"],
)
def test_every_kind_of_request_gets_what_float32_gives(overflowing_model, params, overlap):
    found = []
    for settings in ({"dtype": "float32", "kv_cache_dtype": "float16"}, {"dtype": "float16", "overlap": overlap}):
        with LLM(str(overflowing_model), **SETTINGS | settings) as llm:
            output = llm.generate([{"prompt_token_ids": [3, HOT, 9]}], params, use_tqdm=False)[0]
            known = [None if at is None else list(at) for at in output.prompt_logprobs or ()]
            found.append(([list(one.token_ids) for one in output.outputs], output.error, known))
    assert found[0] == found[1]


@pytest.mark.parametrize("guarded", [True, False])
def test_no_log_probability_of_a_prompt_is_no_number(overflowing_model, tmp_path, guarded):
    """Here the last layer alone overflows: nobody but the hot token itself, amid the prompt, notices."""
    tensors = load_file(overflowing_model / "model.safetensors")
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = tensors[f"model.layers.0.mlp.{name}.weight"]
        tensors[f"model.layers.2.mlp.{name}.weight"] = weight * (4 if name == "down_proj" else 1)
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0.0
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(str(tmp_path), **SETTINGS, dtype="float16", adaptive_precision=guarded) as llm:
        params = replace(GREEDY, prompt_logprobs=0)
        output = llm.generate([{"prompt_token_ids": [3, HOT, 9, 10]}], params, use_tqdm=False)[0]
    if guarded:
        found = [one.logprob for at in output.prompt_logprobs[1:] for one in at.values()]
        assert output.error is None and len(found) == 3 and all(map(math.isfinite, found))
    else:
        assert "not finite" in output.error
