"""A quantized checkpoint that is not supported, damaged or hostile ends in one sentence, which says what to do."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
CT = ct_config({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True})


def valid() -> dict[str, tuple[dict, dict]]:
    """A checkpoint of each format: its settings and tensors."""
    codes, groups = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 16, COLUMNS // 32
    zeros, scale = torch.full((ROWS, groups), 7), torch.ones(ROWS, groups)
    weight = codes.to(torch.float8_e4m3fn)
    asymmetric = ct_config({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False})
    more = {f"{LAYER}.weight_zero_point": torch.zeros(ROWS // 8, groups, dtype=torch.int32)}
    return {
        "gptq": (GPTQ, gptq_tensors(codes, zeros, scale, 4)),
        "awq": (AWQ, awq_tensors(codes, zeros, scale)),
        "fp8": (FP8, fp8_tensors(weight, torch.ones(()), "weight_scale", "input_scale")),
        "compressed-tensors": (asymmetric, compressed_tensors(codes, scale, 4) | more),
    }


FORMATS = valid()


def read_everything(folder) -> None:
    checkpoint = open_quantized(SafetensorsCheckpoint(folder))
    for name in checkpoint.names():
        checkpoint.tensor(name)
    if hasattr(checkpoint, "groups"):
        for name in checkpoint.names():
            assert (checkpoint.stored(name) is None) == (checkpoint.groups(name) is None)
        checkpoint.notes()


def sentence(folder) -> str:
    with pytest.raises(ModelError) as caught:
        read_everything(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_the_undamaged_checkpoint_is_read(form, tmp_path):
    read_everything(saved(tmp_path, FORMATS[form][1], FORMATS[form][0]))


WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 32}
REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes', which cannot be loaded"),
    ({"quant_method": "modelopt"}, "there are compressed-tensors, gptq, awq, fp8 and GGUF files: use one of those"),
    ({"bits": 4}, "quant_method=None"),
    ("awq", "it must be a JSON object"),
    (GPTQ | {"bits": 3}, "gptq and has bits=3, which cannot be loaded; use a checkpoint of 4 or 8 bits"),
    (GPTQ | {"bits": "4"}, "bits='4', which cannot be loaded; it must be a whole number"),
    (GPTQ | {"bits": True}, "bits=True"),
    (GPTQ | {"bits": None}, "has no bits in its config"),
    (GPTQ | {"group_size": 0}, "group_size=0"),
    (GPTQ | {"checkpoint_format": "gptq_p"}, "checkpoint_format='gptq_p', which cannot be loaded; use one whose"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype='int16'"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, "bits=2"),
    (GPTQ | {"dynamic": {"+:.*": 4}}, "dynamic.+:.*=4"),
    (GPTQ | {"dynamic": {"+:(": {}}}, "no usable regular expression"),
    (GPTQ | {"dynamic": {"+:" + "a" * 2000: {}}}, "no usable regular expression"),
    (GPTQ | {"dynamic": {"-:(([a-z_.0-9])*)*!": {}}}, "no usable regular expression"),  # would take for ever
    (GPTQ | {"dynamic": {"-:" + ".*" * 30 + "!": {}}}, "no usable regular expression"),
    (AWQ | {"version": "gemv"}, "awq and has version='gemv', which cannot be loaded; use a checkpoint whose version"),
    (AWQ | {"bits": 8}, "bits=8, which cannot be loaded; use a checkpoint of 4 bits"),
    (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
    (FP8 | {"activation_scheme": "none"}, "it must be one of dynamic, static"),
    (FP8 | {"weight_block_size": [128]}, "weight_block_size=[128]"),
    (FP8 | {"weight_block_size": [0, 128]}, "both must be at least 1"),
    (CT | {"format": "marlin-24"}, "compressed-tensors and has format='marlin-24', which cannot be loaded; use a"),
    (CT | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized'"),
    (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"),
    (CT | {"transform_config": {"config_groups": {"R1": {}}}}, "use a checkpoint without transforms"),
    (CT | {"config_groups": None}, "no config_groups"),
    (CT | {"config_groups": {"W8A8": ["Linear"]}}, "config_groups.W8A8.=['Linear']; it must be a JSON object"),
    (CT | {"ignore": "lm_head"}, "ignore='lm_head', which cannot be loaded; it must be a list of names"),
    (CT | {"ignore": ["re:*"]}, "no usable regular expression"),
    (CT | {"ignore": [LAYER]}, "is stored quantized, but the compressed-tensors config leaves it out"),
    (ct_config(WEIGHTS | {"num_bits": 2}), "config_groups.group_0.weights.num_bits=2, which cannot be loaded"),
    (ct_config(WEIGHTS | {"type": "float"}), "weights.num_bits=4"),
    (ct_config(WEIGHTS | {"strategy": "tensor_group"}), "strategy='tensor_group'"),
    (ct_config(WEIGHTS | {"group_size": None}), "group_size=None"),
    (ct_config(WEIGHTS | {"strategy": "block", "symmetric": False}), "symmetric=False"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_supported_is_named_with_its_value(config, said, tmp_path):
    method = config.get("quant_method") if isinstance(config, dict) else None
    tensors = FORMATS[method if method in FORMATS else "gptq"][1]
    assert said in sentence(saved(tmp_path, tensors, config))


LACKING = {"gptq": "scales", "awq": "qzeros", "fp8": "input_scale", "compressed-tensors": "weight_zero_point"}


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_part_is_named(form, tmp_path):
    tensors = {name: tensor for name, tensor in FORMATS[form][1].items() if not name.endswith(LACKING[form])}
    assert f"lacks '{LAYER}.{LACKING[form]}'" in sentence(saved(tmp_path, tensors, FORMATS[form][0]))


@pytest.mark.parametrize("form", FORMATS)
def test_a_config_for_another_model_is_noticed_before_unpacking(form, tmp_path):
    settings_, tensors = FORMATS[form]
    said = sentence(saved(tmp_path, tensors, settings_, intermediate_size=2 * COLUMNS))
    assert f"'{LAYER}' has shape [32, 64] but config.json implies [32, 128]" in said


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_of_other_types_and_shapes_are_refused(form, tmp_path):
    settings_, tensors = FORMATS[form]
    for name, tensor in tensors.items():
        for damaged in (
            tensor.to(torch.float64),
            torch.cat([tensor.reshape(-1)] * 3)[: tensor.numel() + 1],
            tensor.new_zeros(()) if tensor.dim() else tensor.new_zeros(7),
            tensor.new_zeros(0, 0),
        ):
            said = sentence(saved(tmp_path, tensors | {name: damaged}, settings_))
            assert name in said or f"'{LAYER}'" in said


def test_groups_beyond_the_last_are_refused(tmp_path):
    tensors = FORMATS["gptq"][1] | {f"{LAYER}.g_idx": torch.arange(COLUMNS, dtype=torch.int32)}
    assert "names groups 0 to 63, but there are 2" in sentence(saved(tmp_path, tensors, GPTQ))


def test_a_shape_that_does_not_fit_its_packed_numbers_is_refused(tmp_path):
    tensors = FORMATS["compressed-tensors"][1] | {f"{LAYER}.weight_shape": torch.tensor([2**40, 2**40])}
    assert "weight_shape' says [1099511627776" in sentence(saved(tmp_path, tensors, CT))


def test_codes_of_more_bits_than_announced_are_refused(tmp_path):
    config = ct_config({"num_bits": 4, "strategy": "channel"}, format="int-quantized")
    tensors = {WEIGHT: torch.full((ROWS, COLUMNS), 9, dtype=torch.int8), f"{LAYER}.weight_scale": torch.ones(ROWS, 1)}
    assert "more than the 4 bits" in sentence(saved(tmp_path, tensors, config))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_inputs_that_is_no_positive_number_is_refused(value, tmp_path):
    tensors = FORMATS["fp8"][1] | {f"{LAYER}.input_scale": torch.tensor(value)}
    assert "a scale must be a positive number" in sentence(saved(tmp_path, tensors, FP8))


@pytest.mark.parametrize(("form", "part"), [("gptq", "scales"), ("awq", "scales"), ("fp8", "weight_scale")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_of_weights_that_are_no_numbers_are_refused(form, part, value, tmp_path):
    config, tensors = FORMATS[form]
    damaged = tensors[f"{LAYER}.{part}"].clone()
    damaged[(-1,) * damaged.dim()] = value
    said = sentence(saved(tmp_path, tensors | {f"{LAYER}.{part}": damaged}, config))
    assert f"the scales of '{WEIGHT}' hold what is no finite number" in said


def fuzz(number):
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


JUNK = st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.sampled_from(["", "gptq", "re:(", "int"])
JUNK = JUNK | st.lists(JUNK, max_size=2) | st.dictionaries(st.sampled_from(["weights", "format"]), JUNK, max_size=2)


@fuzz(300)
@given(data=st.data())
def test_changed_settings_raise_nothing_but_model_error(tmp_path, data):
    form = data.draw(st.sampled_from(sorted(FORMATS)))
    config = json.loads(json.dumps(FORMATS[form][0]))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = config
        while inner := [value for value in holder.values() if isinstance(value, dict) and value]:
            if data.draw(st.booleans()):
                break
            holder = data.draw(st.sampled_from(inner))
        holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(JUNK)
    folder = saved(tmp_path, FORMATS[form][1], config)
    try:
        read_everything(folder)
    except ModelError as error:
        assert "\n" not in str(error)


@fuzz(300)
@given(data=st.data())
def test_flipped_bytes_raise_nothing_but_model_error(tmp_path, data):
    form = data.draw(st.sampled_from(sorted(FORMATS)))
    path = saved(tmp_path, FORMATS[form][1], FORMATS[form][0]) / "model.safetensors"
    content = bytearray(path.read_bytes())
    end = struct.unpack("<Q", content[:8])[0] + 8  # of the header; beyond it most bytes are valid codes
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(8, end - 1) | st.integers(end, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read_everything(tmp_path)
    except ModelError as error:
        assert "\n" not in str(error)
