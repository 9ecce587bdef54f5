"""SmoothQuant on a model with planted outliers, which plain 8-bit inputs cannot hold."""

from __future__ import annotations

import pytest
import torch
from small_models import MemoryCheckpoint, checkpoint, text
from tiny import logits_of

from tokenmill.model.families import spec_from_config
from tokenmill.quant.forms import parse_layout
from tokenmill.quant.tool.calibrate import LayerCalibration, round_inputs
from tokenmill.quant.tool.evaluate import StoreBuilder
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Method, plan_forms, quantize_model
from tokenmill.quant.tool.smooth import smoothing_scale

CPU = torch.device("cpu")
PLANTED = (5, 23, 40)


def planted() -> MemoryCheckpoint:
    """The same function as without: some norm channels are 50 times larger, and their readers' columns smaller."""
    model = checkpoint()
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for layer in range(model.config["num_hidden_layers"]):
        for norm, names in readers.items():
            for channel in PLANTED:
                model.tensors[f"model.layers.{layer}.{norm}.weight"][channel] *= 50
                for name in names:
                    model.tensors[f"model.layers.{layer}.{name}.weight"][:, channel] /= 50
    return model


def divergence(model: MemoryCheckpoint, method: Method, kind: str = "w8a8") -> float:
    source = LayerSource(spec_from_config(model.config), model)
    forms, _ = plan_forms(source.spec, parse_layout(kind))
    builder = StoreBuilder(source)
    for layer in quantize_model(source, forms, method, text(8, 48), CPU):
        builder.add(layer)
    ids = text(4, 48, seed=9)
    base = logits_of(source.spec, StoreBuilder(source).build(), ids).log_softmax(-1)
    other = logits_of(source.spec, builder.build(), ids).log_softmax(-1)
    return float((base.exp() * (base - other)).sum(-1).mean())


def test_planted_outliers_change_no_logits():
    ids, found = text(2, 24), []
    for model in (checkpoint(), planted()):
        source = LayerSource(spec_from_config(model.config), model)
        found.append(logits_of(source.spec, StoreBuilder(source).build(), ids))
    assert torch.allclose(*found, atol=1e-3)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_outliers_ruin_plain_inputs_and_not_smoothed_ones(static):
    calm = divergence(checkpoint(), Method(clip=False, static_inputs=static))
    plain = divergence(planted(), Method(clip=False, static_inputs=static))
    smoothed = divergence(planted(), Method("smoothquant", clip=False, static_inputs=static))
    print(f"KL: without outliers {calm:.5f}, plain {plain:.5f}, smoothed {smoothed:.5f}")
    assert plain > 5 * calm
    assert smoothed < 0.2 * plain


def test_scales_divide_the_difficulty():
    weight = torch.tensor([[1.0, 0.01], [0.5, 0.02]])
    scale = smoothing_scale(weight, torch.tensor([4.0, 100.0]), alpha=0.5)
    assert torch.allclose(scale, torch.tensor([2.0, (100 / 0.02) ** 0.5]))
    assert torch.allclose(smoothing_scale(weight, torch.tensor([4.0, 100.0]), alpha=1.0), torch.tensor([4.0, 100.0]))


def test_static_scales_reach_as_far_as_the_text_did():
    model = checkpoint()
    source = LayerSource(spec_from_config(model.config), model)
    forms, _ = plan_forms(source.spec, parse_layout("w8a8"))
    ids = text(8, 48)
    first = next(iter(quantize_model(source, forms, Method(static_inputs=True), ids, CPU)))
    known = LayerCalibration(source, ids, CPU).moments(0, source.layer(0))
    assert first.groups.keys() == known.keys() == {"qkv", "o", "gate_up", "down"}
    for name, groups in first.groups.items():
        assert float(groups.input_scale) == pytest.approx(float(known[name].largest.max()) / 127)


def test_inputs_are_rounded_for_each_token():
    x = torch.tensor([[1.0, -127.0, 0.4], [0.0, 0.0, 0.0], [10.0, 20.0, -254.0]])
    assert torch.equal(round_inputs(x, "int8")[0], torch.tensor([1.0, -127.0, 0.0]))
    assert torch.equal(round_inputs(x, "int8")[1], torch.zeros(3))
    assert torch.equal(round_inputs(x, "int8")[2], torch.tensor([10.0, 20.0, -254.0]))
    assert torch.equal(round_inputs(x, "int8", torch.tensor(1.0))[2], torch.tensor([10.0, 20.0, -128.0]))
    assert round_inputs(x, "fp8")[2, 2] == -254
