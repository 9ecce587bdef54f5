"""A config.json, in every form in which it is published, becomes the right DecoderSpec or a sentence."""

from __future__ import annotations

import subprocess
import sys

import published_configs as published
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ModelError
from tokenmill.model.families import FAMILIES, spec_from_config
from tokenmill.model.rope import inverse_frequencies


@pytest.mark.parametrize("name", list(published.PARAMETERS))
def test_published_models_have_their_published_number_of_parameters(name):
    config, count = published.PARAMETERS[name]
    spec = spec_from_config(config)
    assert sum(param.numel for param in spec.parameters().values()) == count


def test_every_architecture_is_among_the_published_and_the_compared():
    of_published = {spec_from_config(config).architecture for config, _ in published.PARAMETERS.values()}
    compared = {f"{architecture}ForCausalLM" for architecture, _ in tiny_models.CASES.values()}
    assert of_published == compared == set(FAMILIES)


def test_kv_bytes_and_weight_bytes_follow_the_shapes():
    llama = spec_from_config(published.LLAMA_3_1_8B)
    assert llama.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2
    assert llama.weight_bytes(2) == 2 * 8_030_261_248
    lite = spec_from_config(published.DEEPSEEK_V2_LITE)
    assert lite.kv_bytes_per_token(2) == 27 * (512 + 64) * 2
    assert [(shape.kv_heads, shape.k_dim, shape.v_dim) for shape in lite.kv_shapes] == [(1, 576, 0)] * 27
    routers = 26 * 64 * 2048  # stay in float32
    assert lite.weight_bytes(2) == 2 * 15_706_484_224 + 2 * routers


def test_new_and_old_rope_forms_mean_the_same():
    old = published.LLAMA_3_1_8B
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    new |= {"rope_parameters": old["rope_scaling"] | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert spec_from_config(new) == spec_from_config(old)


def test_old_gemma3_form_means_the_same_as_layer_types_and_nested_ropes():
    old = spec_from_config(published.GEMMA_3_4B)
    text = {key: value for key, value in published.GEMMA_3_4B["text_config"].items() if key != "rope_scaling"}
    text["layer_types"] = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)]
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert spec_from_config(published.GEMMA_3_4B | {"text_config": text}) == old
    assert old.windows[:6] == (1024,) * 5 + (None,)
    assert [(rope.theta, rope.factor) for rope in old.ropes[4:6]] == [(10000.0, 1.0), (1000000.0, 8.0)]


def test_special_tokens_may_be_one_or_several_or_none():
    assert spec_from_config(published.LLAMA_3_1_8B).eos_ids == (128001, 128008, 128009)
    assert spec_from_config(published.LLAMA_2_7B).eos_ids == (2,)
    assert spec_from_config(published.QWEN3_0_6B).eos_ids == ()
    assert spec_from_config(published.GEMMA_3_4B).eos_ids == (1, 106)
    assert spec_from_config(published.LLAMA_3_1_8B).bos_id == 128000


def test_qwen_windows_are_off_unless_the_config_turns_them_on():
    config = published.QWEN2_5_0_5B
    assert set(spec_from_config(config).windows) == {None}
    turned_on = spec_from_config(config | {"use_sliding_window": True})
    assert turned_on.windows == (None,) * 21 + (32768,) * 3


def test_yarn_extends_the_length_that_the_config_still_gives():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_from_config(published.QWEN2_5_0_5B | {"rope_scaling": yarn}).max_positions == 131072


def test_an_architecture_is_found_by_model_type_when_none_is_named():
    config = {key: value for key, value in published.LLAMA_3_1_8B.items() if key != "architectures"}
    assert spec_from_config(config) == spec_from_config(published.LLAMA_3_1_8B)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["'MambaForCausalLM'", "not supported", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": None}, ["names no architecture"]),
        ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
        ({"hidden_size": None}, ["no hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_attention_heads": 33}, ["4096", "33"]),
        ({"num_key_value_heads": 5}, ["32 heads", "5"]),
        ({"hidden_act": "relu"}, ["'relu'", "silu"]),
        ({"rope_scaling": {"rope_type": "mrope"}}, ["'mrope'", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["llama3", "factor"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, ["short_factor", "64"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        ({"eos_token_id": [2, "x"]}, ["eos_token_id", "'x'"]),
    ],
)
def test_a_wrong_config_is_refused_in_one_sentence(change, words):
    with pytest.raises(ModelError) as caught:
        spec_from_config(published.LLAMA_3_1_8B | change)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (published.DEEPSEEK_V2_LITE, {"attention_bias": True}, ["attention_bias"]),
        (published.DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, ["'noaux_tc'"]),
        (published.MIXTRAL_8X7B, {"num_experts_per_tok": 9}, ["9 of 8"]),
        (published.GEMMA_2_2B, {"layer_types": ["full_attention"]}, ["layer_types", "26"]),
        (published.GEMMA_2_2B, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    ],
)
def test_what_an_architecture_cannot_do_is_refused(config, change, words):
    with pytest.raises(ModelError) as caught:
        spec_from_config(config | change)
    for word in words:
        assert word in str(caught.value)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([1.5, -1.0, 1e308, float("nan"), float("inf"), "", "yarn", [], [None], {}, {"a": 1}, 10**40]),
)
ROPES = ["rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "mscale"]


@settings(max_examples=300, deadline=None)
@given(config=st.sampled_from([config for config, _ in published.PARAMETERS.values()]), data=st.data())
def test_junk_in_a_config_gives_a_spec_or_a_sentence(config, data):
    changes = data.draw(st.dictionaries(st.sampled_from([*config, "rope_scaling", "layer_types"]), JUNK, max_size=2))
    kinds = st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope"])
    if data.draw(st.booleans()):
        rope = {"rope_type": data.draw(kinds | JUNK)} | data.draw(st.dictionaries(st.sampled_from(ROPES[1:]), JUNK))
        changes["rope_scaling"] = rope | {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    try:
        spec = spec_from_config(config | changes)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    assert spec.weight_bytes(2) > 0
    if spec.num_layers < 100 and spec.head_dim < 10000:
        assert torch.isfinite(inverse_frequencies(spec.ropes[0], 100)).all()


def test_specs_need_no_torch():
    script = "import sys, tokenmill.model.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
