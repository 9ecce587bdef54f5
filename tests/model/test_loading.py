"""Checkpoints load into the fused weights whatever way they are stored, and broken ones are refused in a sentence."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import pytest
import tiny_models
import torch
from decoder_driver import Sequence, load_decoder, make_decoder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tokenmill.errors import ModelError
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.load import load_weights
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint

PROMPT = list(range(3, 23))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """case -> the directory of its checkpoint; made once."""
    made = {}

    def directory(case: str):
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            tiny_models.make(case).save_pretrained(made[case])
        return made[case]

    return directory


@pytest.fixture
def copy(saved, tmp_path):
    def fresh(case: str):
        return shutil.copytree(saved(case), tmp_path / "copy")

    return fresh


def logits(directory, dtype=torch.float32):
    return Sequence(load_decoder(directory, 64, dtype), 64).push(PROMPT)


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def load(directory):
    checkpoint = SafetensorsCheckpoint(directory)
    return load_weights(spec_from_config(checkpoint.config), checkpoint, torch.float32, "cpu")


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe", "deepseek-v2"])
def test_stacked_experts_load_like_separate_ones(case, saved, copy):
    expected = logits(saved(case))
    directory = copy(case)
    in_memory = tiny_models.make(case).state_dict()  # transformers stacks them there
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in in_memory)
    save_file(in_memory, directory / "model.safetensors")
    assert torch.equal(logits(directory), expected)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: "language_model." + name,
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
    ids=["bare", "wrapped", "wrapped-inside"],
)
def test_prefixes_of_bare_and_multimodal_checkpoints_are_understood(rename, saved, copy):
    expected = logits(saved("gemma3"))
    directory = copy("gemma3")
    vision = {"vision_tower.patch.weight": torch.zeros(2)}
    rewrite(directory, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()} | vision)
    assert torch.equal(logits(directory), expected)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3-moe", "deepseek-v2"])
def test_float64_is_float64_throughout(case, saved):
    exact = logits(saved(case), torch.float64)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), logits(saved(case)), rtol=0, atol=1e-4)
    # Chunking does not show at all beyond float64's own rounding.
    chunked = Sequence(load_decoder(saved(case), 64, torch.float64), 64)
    parts = torch.cat([chunked.push(PROMPT[:13]), chunked.push(PROMPT[13:])])
    torch.testing.assert_close(parts, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_stay_close(dtype, saved):
    half = logits(saved("gemma3"), dtype)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, logits(saved("gemma3")), rtol=0, atol=0.1)


def test_longrope_follows_the_length_that_is_served(saved):
    directory = saved("phi3-longrope-long")  # original length 16
    checkpoint = SafetensorsCheckpoint(directory)
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(spec, checkpoint, torch.float32, "cpu")
    short, long = (Sequence(make_decoder(spec, weights, length), 16).push(PROMPT[:16]) for length in (16, 17))
    assert (short - long).abs().max() > 1e-3


def test_progress_reaches_its_total(saved):
    seen = []
    checkpoint = SafetensorsCheckpoint(saved("llama"))
    spec = spec_from_config(checkpoint.config)
    load_weights(spec, checkpoint, torch.float32, "cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_harmless_extra_tensors_are_ignored(saved, copy):
    directory = copy("llama-multi-head")  # tied
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6),
        "lm_head.weight": torch.full((160, 48), 7.0),
    }
    rewrite(directory, lambda tensors: tensors | extra)
    assert torch.equal(logits(directory), logits(saved("llama-multi-head")))


def test_tensors_that_the_config_does_not_use_are_refused(copy):
    directory = copy("llama")
    rewrite(directory, lambda tensors: tensors | {"model.layers.1.self_attn.q_proj.bias": torch.ones(48)})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.bias.*does not use"):
        load(directory)


def test_missing_tensors_are_named(copy):
    directory = copy("llama")
    rewrite(directory, lambda tensors: {name: t for name, t in tensors.items() if ".1.mlp" not in name})
    with pytest.raises(ModelError, match=r"lacks .*layers\.1\.mlp\.gate_proj\.weight"):
        load(directory)


def test_a_missing_expert_is_named(copy):
    directory = copy("qwen3-moe")
    gone = "model.layers.1.mlp.experts.5.up_proj.weight"
    rewrite(directory, lambda tensors: {name: t for name, t in tensors.items() if name != gone})
    with pytest.raises(ModelError, match=r"lacks 'model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight', which"):
        load(directory)


def test_a_wrong_shape_is_named_with_both_shapes(copy):
    directory = copy("llama")
    rewrite(directory, lambda tensors: tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(79, 48)})
    with pytest.raises(ModelError, match=r"up_proj\.weight' has shape \[79, 48\] but config.json implies \[80, 48\]"):
        load(directory)


def test_an_unusable_dtype_is_named(copy):
    directory = copy("llama")
    rewrite(directory, lambda tensors: tensors | {"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is of type int8"):
        load(directory)


def test_a_quantized_checkpoint_is_refused(copy):
    directory = copy("llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quantized with gptq"):
        load(directory)


@pytest.mark.parametrize("size", [0, 4, 100, 5000, -1])
def test_truncated_safetensors_are_refused(size, copy):
    path = copy("llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors of \d+ bytes is truncated or corrupt"):
        SafetensorsCheckpoint(path.parent)


def test_a_corrupt_header_is_refused(copy):
    path = copy("llama") / "model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        SafetensorsCheckpoint(path.parent)


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1), value=st.integers(0, 255), in_header=st.booleans())
def test_a_flipped_byte_gives_weights_or_a_sentence(where, value, in_header, saved, tmp_path_factory):
    original = (saved("llama") / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(original[:8], "little") if in_header else len(original)
    broken = bytearray(original)
    broken[int(where * (end - 1))] = value
    directory = tmp_path_factory.mktemp("flipped")
    (directory / "config.json").write_bytes((saved("llama") / "config.json").read_bytes())
    (directory / "model.safetensors").write_bytes(broken)
    with suppress(ModelError):
        load(directory)
    shutil.rmtree(directory)


def test_a_missing_shard_is_named(tmp_path):
    tiny_models.make("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ModelError, match=r"model-00002.*is not there"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "pytorch_model.bin", 3])
def test_an_index_cannot_point_elsewhere(shard, copy):
    directory = copy("llama")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsCheckpoint(directory)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no config.json"), ("{broken", "not valid JSON"), ("[1]", "JSON object"), (b"\xff\xfe\x00", "not valid")],
)
def test_a_missing_or_broken_config_is_refused(content, words, copy):
    path = copy("llama") / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=words):
        SafetensorsCheckpoint(path.parent)


def test_a_directory_without_weights_is_refused(copy):
    path = copy("llama") / "model.safetensors"
    path.unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        SafetensorsCheckpoint(path.parent)
