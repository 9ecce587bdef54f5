"""Each public layout, packed here number by number as its documentation says, is read back; so are its odd corners."""

from __future__ import annotations

import json

import pytest
import torch
from quantized_files import (
    COLUMNS,
    LAYER,
    ROWS,
    WEIGHT,
    awq_tensors,
    compressed_tensors,
    ct_config,
    fp8_tensors,
    gptq_tensors,
    saved,
)

from tokenmill.errors import ModelError
from tokenmill.model.weights.quantized import open_quantized
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.quant.forms import WeightForm

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def numbers(bits: int, group: int, seed: int = 0):
    """Unsigned codes [rows, columns], zeros and scales [rows, groups]; every code and zero point occurs."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-COLUMNS // group)
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=generator)
    zeros = torch.randint(0, 2**bits, (ROWS, groups), generator=generator)
    scale = (torch.rand(ROWS, groups, generator=generator) + 0.1).half()
    return codes, zeros, scale


def floats(codes, zeros, scale, group_of) -> torch.Tensor:
    return (codes - zeros[:, group_of]) * scale.float()[:, group_of]


def opened(folder):
    return open_quantized(SafetensorsCheckpoint(folder))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [16, 32, -1])
def test_gptq(tmp_path, bits, version, group):
    size = COLUMNS if group == -1 else group
    codes, zeros, scale = numbers(bits, size)
    if version == "gptq":
        zeros[zeros == 0] = 1  # plain packing of a zero point less one cannot hold it
    group_of = torch.arange(COLUMNS) // size
    tensors = gptq_tensors(codes, zeros - int(version == "gptq"), scale, bits)
    found = opened(saved(tmp_path, tensors, GPTQ | {"bits": bits, "group_size": group, "checkpoint_format": version}))
    assert torch.equal(found.tensor(WEIGHT), floats(codes, zeros, scale, group_of))
    form = None if bits == 8 or group == 16 else WeightForm("int4", 32 if group == 32 else 64, True)
    assert found.stored(WEIGHT) == form


def test_gptq_zero_points_that_borrowed_from_their_neighbour(tmp_path):
    """Newer tools write the first format by subtracting from whole words."""
    codes, zeros, scale = numbers(4, 32)
    assert (zeros == 0).any()
    tensors = gptq_tensors(codes, zeros, scale, 4)
    tensors[f"{LAYER}.qzeros"] -= 0x11111111
    found = opened(saved(tmp_path, tensors, GPTQ))
    assert torch.equal(found.tensor(WEIGHT), floats(codes, zeros, scale, torch.arange(COLUMNS) // 32))


def test_gptq_columns_in_the_order_of_activations(tmp_path):
    codes, zeros, scale = numbers(4, 32)
    group_of = torch.arange(COLUMNS)[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3))] // 32
    tensors = gptq_tensors(codes, zeros, scale, 4, group_of)
    found = opened(saved(tmp_path, tensors, GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}))
    assert torch.equal(found.tensor(WEIGHT), floats(codes, zeros, scale, group_of))
    assert found.groups(WEIGHT) is None
    assert "order of activations" in found.notes()[0]


def test_gptq_layers_may_have_settings_of_their_own(tmp_path):
    codes, zeros, scale = numbers(8, 16)
    dynamic = {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 16}}
    tensors = gptq_tensors(codes, zeros, scale, 8)
    found = opened(saved(tmp_path, tensors, GPTQ | {"checkpoint_format": "gptq_v2", "dynamic": dynamic}))
    assert torch.equal(found.tensor(WEIGHT), floats(codes, zeros, scale, torch.arange(COLUMNS) // 16))
    with pytest.raises(ModelError, match=r"down_proj' is stored quantized, but the gptq config leaves it out"):
        opened(saved(tmp_path, tensors, GPTQ | {"dynamic": {"-:.*down_proj": {}}}))


def test_gptq_settings_in_a_file_beside_the_config(tmp_path):
    codes, zeros, scale = numbers(4, 32)
    folder = saved(tmp_path, gptq_tensors(codes, zeros, scale, 4), None)
    with pytest.raises(ModelError, match=r"qweight', so it is quantized, but config\.json has no quantization_config"):
        opened(folder)
    settings = {key: value for key, value in GPTQ.items() if key != "quant_method"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings | {"checkpoint_format": "gptq_v2"}))
    assert torch.equal(opened(folder).tensor(WEIGHT), floats(codes, zeros, scale, torch.arange(COLUMNS) // 32))


def test_symmetric_zero_points_betray_a_wrong_format(tmp_path):
    codes, zeros, scale = numbers(4, 32)
    tensors = gptq_tensors(codes, torch.full_like(zeros, 8), scale, 4)
    found = opened(saved(tmp_path, tensors, GPTQ | {"sym": True, "checkpoint_format": "gptq_v2"}))
    assert torch.equal(found.tensor(WEIGHT), (codes - 8) * scale.float().repeat_interleave(32, 1))
    assert found.groups(WEIGHT).zeros is None
    with pytest.raises(ModelError, match="check its checkpoint_format"):
        opened(saved(tmp_path, tensors, GPTQ | {"sym": True})).tensor(WEIGHT)


@pytest.mark.parametrize("group", [32, -1])
def test_awq(tmp_path, group):
    size = COLUMNS if group == -1 else group
    codes, zeros, scale = numbers(4, size)
    found = opened(saved(tmp_path, awq_tensors(codes, zeros, scale), AWQ | {"group_size": group}))
    assert torch.equal(found.tensor(WEIGHT), floats(codes, zeros, scale, torch.arange(COLUMNS) // size))
    assert found.stored(WEIGHT) == WeightForm("int4", 32 if group == 32 else 64, True)


def test_awq_in_older_spelling(tmp_path):
    codes, zeros, scale = numbers(4, 32)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    found = opened(saved(tmp_path, awq_tensors(codes, zeros, scale), old))
    assert torch.equal(found.tensor(WEIGHT), floats(codes, zeros, scale, torch.arange(COLUMNS) // 32))


def test_names_of_layers_that_stay_floats_are_whole_words(tmp_path):
    codes, zeros, scale = numbers(4, 32)
    tensors = awq_tensors(codes, zeros, scale)
    assert opened(saved(tmp_path, tensors, AWQ | {"modules_to_not_convert": ["mlp.down"]})).stored(WEIGHT) is not None
    for name in ("down_proj", "mlp", "model.layers.0", LAYER):
        with pytest.raises(ModelError, match="is stored quantized, but the awq config leaves it out"):
            opened(saved(tmp_path, tensors, AWQ | {"modules_to_not_convert": [name]}))


def test_compressed_tensors_columns_in_the_order_of_activations(tmp_path):
    codes, _, scale = numbers(4, 32)
    group_of = torch.arange(COLUMNS).flip(0) // 32
    config = ct_config({"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"})
    found = opened(saved(tmp_path, compressed_tensors(codes, scale, 4, group_of), config))
    assert torch.equal(found.tensor(WEIGHT), (codes - 8) * scale.float()[:, group_of])
    assert found.stored(WEIGHT) is None and "order of activations" in found.notes()[0]
    unused = torch.full((COLUMNS,), -1)
    found = opened(saved(tmp_path, compressed_tensors(codes, scale, 4, unused), config))
    assert found.stored(WEIGHT) == WeightForm("int4", 32)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, WeightForm("int8")),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}, WeightForm("w8a8")),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}, WeightForm("int8")),
    ],
)
def test_inputs_that_no_form_has_are_left_unrounded(tmp_path, inputs, expected):
    codes, _, scale = numbers(8, COLUMNS)
    config = ct_config({"num_bits": 8, "strategy": "channel"}, inputs)
    found = opened(saved(tmp_path, compressed_tensors(codes, scale, 8), config))
    assert found.stored(WEIGHT) == expected
    assert found.groups(WEIGHT).inputs == ("int8" if expected.kind == "w8a8" else None)
    assert len(found.notes()) == (inputs is not None and expected.kind == "int8")


@pytest.mark.parametrize("block", [None, (16, 32), (128, 128)])
@pytest.mark.parametrize("names", [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale")])
def test_fp8_files(tmp_path, block, names):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
    counts = () if block is None else (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
    scale = torch.rand(counts, generator=generator) + 0.5
    tensors = fp8_tensors(weight, scale, *names)
    config = FP8 | {"activation_scheme": "static", "weight_block_size": block and list(block)}
    found = opened(saved(tmp_path, tensors, config))
    wide = scale if block is None else scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert torch.equal(found.tensor(WEIGHT), weight.float() * (wide if block is None else wide[:ROWS, :COLUMNS]))
    groups = found.groups(WEIGHT)
    assert found.stored(WEIGHT) == WeightForm("fp8", {None: None, (16, 32): 32, (128, 128): 64}[block])
    assert (groups.inputs, groups.input_scale) == (("fp8", 0.25) if block is None else (None, None))


def test_a_block_beyond_the_matrix_takes_no_more_memory_than_the_matrix(tmp_path):
    weight = torch.ones(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    config = FP8 | {"activation_scheme": "dynamic", "weight_block_size": [10**12, 10**12]}
    found = opened(saved(tmp_path, fp8_tensors(weight, torch.full((1, 1), 0.5), "weight_scale_inv"), config))
    assert torch.equal(found.tensor(WEIGHT), weight.float() * 0.5)


def test_fp8_scales_may_be_powers_of_two(tmp_path):
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu)
    config = FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    found = opened(saved(tmp_path, fp8_tensors(weight, scale, "weight_scale_inv"), config))
    assert torch.equal(found.tensor(WEIGHT), weight.float() * 0.25)


def test_empty_biases_and_scales_of_the_cache_are_left_out(tmp_path):
    codes, zeros, scale = numbers(4, 32)
    tensors = awq_tensors(codes, zeros, scale)
    plain = opened(saved(tmp_path, tensors, AWQ))
    more = tensors | {f"{LAYER}.bias": torch.zeros(ROWS), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    found = opened(saved(tmp_path, more, AWQ))
    assert sorted(found.names()) == sorted(plain.names())
    assert plain.notes() == [] and "kv_cache_dtype says how that is kept" in found.notes()[0]
    assert f"{LAYER}.bias" in opened(saved(tmp_path, more | {f"{LAYER}.bias": torch.ones(ROWS)}, AWQ)).names()


def test_layers_that_stay_floats_against_the_config_are_noted(tmp_path):
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tensors = fp8_tensors(weight, torch.ones(()), "weight_scale")
    others = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    assert opened(saved(tmp_path, tensors, FP8 | {"ignored_layers": others})).notes() == []
    notes = opened(saved(tmp_path, tensors, FP8 | {"ignored_layers": others[1:]})).notes()
    assert "model.layers.0.self_attn.q_proj is stored as floats, although the config says otherwise" in notes[0]


def test_a_checkpoint_of_floats_is_given_back(tmp_path):
    checkpoint = SafetensorsCheckpoint(saved(tmp_path, {f"{LAYER}.weight": torch.zeros(ROWS, COLUMNS)}, None))
    assert open_quantized(checkpoint) is checkpoint
