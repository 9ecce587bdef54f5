"""Checkpoints made by the public tools of each format give the logits that those tools compute from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import logits_of

from tokenmill.engine.choices import linear_shapes
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.checkpoint import GroupCheckpoint
from tokenmill.model.weights.load import load_weights, stored_forms
from tokenmill.model.weights.quantized import open_quantized
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.quant.forms import Layout, WeightForm
from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes

DATA = Path(__file__).parent / "data"
INT4, INT4_ZEROS = WeightForm("int4", 32), WeightForm("int4", 32, True)
# What attention and MLP layers are stored as; None: floats only.
FORMS = {
    "awq": (INT4_ZEROS, INT4_ZEROS),
    "fp8_block": (WeightForm("fp8", 64), WeightForm("fp8", 64)),
    "fp8_dynamic": (WeightForm("fp8"), WeightForm("fp8")),
    "fp8_files_block": (WeightForm("fp8", 32), WeightForm("fp8", 32)),
    "fp8_files_tensor": (WeightForm("fp8"), WeightForm("fp8")),
    "fp8_static": (WeightForm("fp8"), WeightForm("fp8")),
    "gptq_8bit": (None, None),
    "gptq_desc_act": (None, None),
    "gptq_v1": (INT4, INT4),
    "gptq_v1_asymmetric": (INT4_ZEROS, INT4_ZEROS),
    "gptq_v2_asymmetric": (INT4_ZEROS, INT4_ZEROS),
    "mixed": (INT4, WeightForm("fp8")),
    "w4a16_channel_asymmetric": (WeightForm("int4", 64, True), WeightForm("int4", 64, True)),
    "w4a16_group": (INT4, INT4),
    "w4a16_group_asymmetric": (INT4_ZEROS, INT4_ZEROS),
    "w8a16_channel": (WeightForm("int8"), WeightForm("int8")),
    "w8a8_dynamic": (WeightForm("w8a8"), WeightForm("w8a8")),
    "w8a8_static": (WeightForm("w8a8"), WeightForm("w8a8")),
}
NOTES = {
    "fp8_block": "inputs are not rounded",
    "fp8_files_block": "inputs are not rounded",
    "gptq_desc_act": "and 13 more layers are held as floats: columns are in the order of activations",
    "gptq_8bit": "no kernel takes such groups or zero points",
}


def opened(name: str) -> GroupCheckpoint:
    checkpoint = open_quantized(SafetensorsCheckpoint(DATA / name))
    assert isinstance(checkpoint, GroupCheckpoint)
    return checkpoint


def logits(checkpoint, schemes=None) -> torch.Tensor:  # [tokens, vocab]
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(spec, checkpoint, torch.float32, "cpu", schemes=schemes)
    return logits_of(spec, weights, expected("awq")["ids"])[0]


def expected(name: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / name / "expected.safetensors")


def test_every_fixture_is_tested():
    assert {folder.parent.name for folder in DATA.glob("*/model.safetensors")} == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_the_tool(name):
    wanted = expected(name)["plain"]
    assert (logits(opened(name)) - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", FORMS)
def test_layers_are_stored_as_they_were_quantized(name):
    checkpoint = opened(name)
    assert all(type(checkpoint.tensor(weight)) is torch.Tensor for weight in checkpoint.names())
    for index, layer in enumerate(("self_attn.k_proj", "mlp.down_proj")):
        form = FORMS[name][index]
        if form is not None and form.group == 64 and layer == "mlp.down_proj":
            form = WeightForm(form.kind, 32, form.zeros)  # 160 columns are no multiple of 64
        assert checkpoint.stored(f"model.layers.0.{layer}.weight") == form
    assert checkpoint.stored("model.norm.weight") is None
    assert checkpoint.stored("lm_head.weight") is None and checkpoint.groups("lm_head.weight") is None


@pytest.mark.parametrize("name", FORMS)
def test_groups_stand_for_the_same_floats_in_the_form_that_was_announced(name):
    checkpoint, quantized = opened(name), 0
    for weight in checkpoint.names():
        form, groups = checkpoint.stored(weight), checkpoint.groups(weight)
        assert (form is None) == (groups is None)
        if groups is None or form is None:
            continue
        quantized += 1
        assert torch.equal(groups.widen(torch.float32), checkpoint.tensor(weight))
        assert groups.group == (form.group or groups.codes.shape[1])
        assert (groups.zeros is not None) == form.zeros
        assert groups.bits == (4 if form.kind == "int4" else 8)
        assert groups.inputs == {"w8a8": "int8", "fp8": None if form.group else "fp8"}.get(form.kind)
        assert (groups.input_scale is not None) == name.endswith("_static")
        if groups.codes.dtype == torch.int8 and groups.bits == 4:
            assert -8 <= int(groups.codes.min()) < 0 < int(groups.codes.max()) <= 7
    assert quantized == {None: 0}.get(FORMS[name][0], 11 if name == "w8a8_dynamic" else 14)


@pytest.mark.parametrize("name", FORMS)
def test_notes_say_what_is_not_as_the_config_asks(name):
    notes = opened(name).notes()
    assert len(notes) == (name in NOTES)
    assert NOTES.get(name, "") in "".join(notes)


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if forms[0] is not None])
def test_logits_are_the_same_when_layers_are_kept_as_stored(name):
    checkpoint = opened(name)
    spec = spec_from_config(checkpoint.config)
    place = ComputeTarget(torch.device("cpu"), torch.float32)
    schemes = choose_schemes(Layout(), linear_shapes(spec), stored_forms(spec, checkpoint), False, place)
    assert len(schemes.as_stored) == (6 if name == "w8a8_dynamic" else 8)
    wanted = expected(name)
    found, largest = logits(checkpoint, schemes), wanted["plain"].abs().max()
    if name == "w8a8_dynamic":  # the tool divides a token's range of int8 by 127.5, where this engine divides by 127
        assert (found - wanted["rounded"]).abs().max() < 0.1 * largest
        return
    # With dynamic float8, a few rows may be multiplied unrounded.
    inputs = [wanted["rounded"]] if name.endswith("_static") else [wanted["plain"], wanted.get("rounded")]
    assert min((found - one).abs().max() for one in inputs if one is not None) < 2e-5 * largest
