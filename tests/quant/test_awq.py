"""AWQ: folding scales changes nothing by itself, and lets the rounded products come closer."""

from __future__ import annotations

import pytest
import torch
from small_models import checkpoint, text
from tiny import logits_of

from tokenmill.model.families import spec_from_config
from tokenmill.quant.forms import parse_form, parse_layout
from tokenmill.quant.tool.awq import best_scale, product_error
from tokenmill.quant.tool.calibrate import Moments
from tokenmill.quant.tool.evaluate import StoreBuilder
from tokenmill.quant.tool.joints import Joint, joints
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Method, Quantized, _prepare, plan_forms, quantize_model

CPU = torch.device("cpu")
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
}
VARIANTS = {
    "grouped heads": {},
    "a head each": {"num_key_value_heads": 4},
    "one for all": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "norms less one": GEMMA,
}


def opened(**changes) -> LayerSource:
    model = checkpoint(**changes)
    return LayerSource(spec_from_config(model.config), model)


def moments_of(inputs: torch.Tensor) -> Moments:  # [tokens, channels]
    return Moments(inputs.T @ inputs, inputs.abs().mean(0), inputs.abs().amax(0))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_scales_that_are_folded_in_change_nothing(changes):
    source, ids = opened(**changes), text(2, 24)
    before = logits_of(source.spec, StoreBuilder(source).build(), ids)
    builder = StoreBuilder(source)
    generator = torch.Generator().manual_seed(3)
    for index in range(source.spec.num_layers):
        params = source.layer(index)
        found = joints(source.spec, params)
        assert {joint.reader for joint in found} == {"qkv", "gate_up", "o", "down"}
        for joint in found:
            old = params[joint.reader]
            scale = joint.shared(torch.rand(old.shape[1], generator=generator) * 4 + 0.25)
            joint.fold(params, scale)
            assert not torch.allclose(params[joint.reader], old)
        builder.add(Quantized(f"layers.{index}.", params))
    after = logits_of(source.spec, builder.build(), ids)
    assert torch.allclose(after, before, atol=1e-4 * float(before.abs().max()))


def test_heads_that_share_values_share_scales():
    joint = Joint("o", "qkv", first=96, rows=32, repeat=2, width=16)
    shared = joint.shared(torch.arange(64.0)).view(2, 2, 16)
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert torch.equal(shared[0, 0], torch.arange(16.0, 32.0))  # the larger of both


def test_channels_with_large_inputs_are_scaled_up():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    inputs = torch.randn(400, 128, generator=generator)
    inputs[:, 7] *= 30
    form, moments = parse_form("int4-g32"), moments_of(inputs)
    scale = best_scale(weight, moments, form, Joint("qkv", "before_attention"))
    assert scale.argmax() == 7 and scale[7] > 1.5 * scale.median()
    plain = product_error(weight, torch.ones(128), moments.gram, form)
    assert product_error(weight, scale, moments.gram, form) < 0.8 * plain


def test_the_error_that_is_minimized_is_that_of_the_product():
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(8, 64, generator=generator), torch.randn(50, 64, generator=generator)
    from tokenmill.quant.rounding import round_to_nearest

    form, scale = parse_form("int4-g32"), torch.rand(64, generator=generator) + 0.5
    rounded = round_to_nearest(weight * scale, form).widen(torch.float32)
    direct = ((inputs / scale) @ rounded.T - inputs @ weight.T).square().sum()
    assert product_error(weight, scale, inputs.T @ inputs, form) == pytest.approx(float(direct), rel=1e-3)


def test_moments_follow_the_inputs_that_are_scaled():
    generator = torch.Generator().manual_seed(0)
    inputs, scale = torch.randn(50, 64, generator=generator), torch.rand(64, generator=generator) + 0.5
    got, expected = moments_of(inputs).divided(scale), moments_of(inputs / scale)
    for one, other in zip((got.gram, got.mean, got.largest), (expected.gram, expected.mean, expected.largest)):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_folding_is_part_of_scaling():
    source = opened()
    params = source.layer(0)
    norm, weight = params["before_attention"], params["qkv"]
    inputs = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * norm
    known = {"qkv": moments_of(inputs)}
    _prepare(source.spec, params, {"qkv": parse_form("int4-g32")}, Method("awq"), known)
    scale = norm / params["before_attention"]
    assert torch.allclose(params["qkv"], weight * scale, rtol=1e-4)
    assert torch.allclose(known["qkv"].mean, (inputs / scale).abs().mean(0), rtol=1e-3)


def divergence(source: LayerSource, method: Method, layout: str = "int4-g32") -> float:
    forms, _ = plan_forms(source.spec, parse_layout(layout))
    builder = StoreBuilder(source)
    for layer in quantize_model(source, forms, method, text(16, 48), CPU):
        builder.add(layer)
    ids = text(8, 48, seed=9)
    base = logits_of(source.spec, StoreBuilder(source).build(), ids).log_softmax(-1)
    other = logits_of(source.spec, builder.build(), ids).log_softmax(-1)
    return float((base.exp() * (base - other)).sum(-1).mean())


def test_calibrated_methods_move_predictions_less_than_rounding_does():
    source = opened()
    nearest, plain = divergence(source, Method()), divergence(source, Method(clip=False))
    awq, gptq = divergence(source, Method("awq")), divergence(source, Method("gptq"))
    print(f"KL: plain {plain:.4f}, clipped {nearest:.4f}, awq {awq:.4f}, gptq {gptq:.4f}")
    assert awq < 0.85 * min(nearest, plain)
    assert gptq < 0.75 * min(nearest, plain)
