"""A GGUF file gives the same model as the checkpoint it was made from."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf_files import convert, finish
from safetensors.torch import save_file

from tokenmill.errors import ModelError
from tokenmill.model.weights.gguf import GGUFCheckpoint
from tokenmill.model.weights.gguf_blocks import block_layout, dequantize

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0]

MODELS = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama wide heads": {"model_type": "llama", "head_dim": 32},
    "llama linear rope": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 8},
    "phi3 partial rope": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "num_hidden_layers": 6,
    },
    "olmo2": {"model_type": "olmo2"},
}


def make_model(settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**COMMON, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # larger than at initialization, so that a mistake is visible
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def reload_in_transformers(checkpoint: GGUFCheckpoint, folder):
    """The checkpoint as a directory that transformers can load: both its config and its names are put to the test."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, "pad_token_id": None}))
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_gguf_gives_the_logits_of_the_original(name, tmp_path):
    model = make_model(MODELS[name])
    model.save_pretrained(tmp_path / "original")
    checkpoint = GGUFCheckpoint(convert(tmp_path / "original", model.config, tmp_path / "model.gguf"))
    again = reload_in_transformers(checkpoint, tmp_path / "again")
    ids = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = model(ids).logits, again(ids).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_config_made_from_gguf_is_one_the_decoder_understands(name, tmp_path):
    from tokenmill.model.families import spec_from_config

    model = make_model(MODELS[name])
    model.save_pretrained(tmp_path / "original")
    checkpoint = GGUFCheckpoint(convert(tmp_path / "original", model.config, tmp_path / "model.gguf"))
    spec = spec_from_config(checkpoint.config)
    assert (spec.hidden, spec.num_layers, spec.vocab_size) == (64, model.config.num_hidden_layers, 96)


def test_stored_rope_frequencies_are_applied_exactly(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings = {"model_type": "llama", "rope_scaling": {**scaling, "original_max_position_embeddings": 32}}
    model = make_model(settings)
    model.save_pretrained(tmp_path / "original")
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7
    path = convert(tmp_path / "original", model.config, tmp_path / "model.gguf", {"rope_freqs.weight": factors})
    again = reload_in_transformers(GGUFCheckpoint(path), tmp_path / "again")
    ids = torch.randint(3, 96, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)


def test_phi3_long_and_short_rope_factors_are_kept(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": FACTORS, "attention_factor": 1.25}
    settings = {
        "model_type": "phi3",
        "rope_parameters": {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 64,
    }
    model = make_model(settings)
    model.save_pretrained(tmp_path / "original")
    extra = {
        "rope_factors_long.weight": np.array(FACTORS, dtype=np.float32),
        "rope_factors_short.weight": np.ones(8, dtype=np.float32),
    }
    checkpoint = GGUFCheckpoint(convert(tmp_path / "original", model.config, tmp_path / "model.gguf", extra))
    scaling = checkpoint.config["rope_scaling"]
    assert (scaling["long_factor"], scaling["short_factor"]) == (FACTORS, [1.0] * 8)
    assert (scaling["attention_factor"], scaling["original_max_position_embeddings"]) == (1.25, 64)


def formats():
    from gguf.quants import _type_traits

    return [*sorted(_type_traits), gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16]


@pytest.mark.parametrize("kind", formats(), ids=lambda kind: kind.name)
def test_every_block_format_decodes_as_the_gguf_package_does(kind):
    values, size = block_layout(int(kind))
    rows = np.random.default_rng(0).integers(0, 256, (5, 3 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
    got = dequantize(rows.reshape(-1), int(kind), (5, 3 * values))
    np.testing.assert_array_equal(got, expected.reshape(5, 3 * values))


def test_default_model_decodes_bit_for_bit_as_the_gguf_package_does(default_gguf):
    checkpoint = GGUFCheckpoint(default_gguf)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(default_gguf).tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.3.mlp.down_proj.weight": "blk.3.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }
    assert len(checkpoint.names()) == len(stored)
    for ours, theirs in pairs.items():
        expected = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        np.testing.assert_array_equal(checkpoint.tensor(ours).numpy(), expected)


def test_experts_stored_one_by_one_get_the_same_names_as_stacked_ones(tmp_path):
    writer = tiny_writer(tmp_path / "old.gguf", experts=2)
    for expert in range(2):
        writer.add_tensor(f"blk.0.ffn_gate.{expert}.weight", np.full((4, 4), expert, dtype=np.float32))
    checkpoint = GGUFCheckpoint(finish(writer, tmp_path / "old.gguf"))
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    assert name in checkpoint.names() and checkpoint.tensor(name).eq(1).all()


def test_a_split_model_is_read_from_all_its_parts(tmp_path):
    paths = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    first = tiny_writer(paths[0])
    first.add_uint16("split.count", 2)
    finish(first, paths[0])
    second = gguf.GGUFWriter(paths[1], "llama")
    second.add_uint16("split.count", 2)
    second.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    finish(second, paths[1])
    assert "model.norm.weight" in GGUFCheckpoint(paths[0]).names()
    paths[1].unlink()
    with pytest.raises(ModelError, match="m-00002-of-00002"):
        GGUFCheckpoint(paths[0])


def test_tensors_that_the_architecture_does_not_have_are_refused(tmp_path):
    writer = tiny_writer(tmp_path / "odd.gguf")
    writer.add_tensor("blk.0.ssm_conv1d.weight", np.zeros((4, 4), dtype=np.float32))
    with pytest.raises(ModelError, match="ssm_conv1d"):
        GGUFCheckpoint(finish(writer, tmp_path / "odd.gguf"))


def test_unknown_architecture_is_named_in_the_error(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "rwkv.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    with pytest.raises(ModelError, match=r"'rwkv7'.*llama"):
        GGUFCheckpoint(finish(writer, tmp_path / "rwkv.gguf"))


def tiny_writer(path, experts=0):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), dtype=np.float32))
    return writer
