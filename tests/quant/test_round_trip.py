"""What we write loads in transformers with compressed-tensors, and computes the same."""

from __future__ import annotations

import pytest
import torch
from small_models import checkpoint, text
from tiny import logits_of

from tokenmill.model.families import spec_from_config
from tokenmill.quant.forms import parse_layout
from tokenmill.quant.tool import calibrate
from tokenmill.quant.tool.evaluate import StoreBuilder
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Method, plan_forms, quantize_model
from tokenmill.quant.tool.write import pack_int32, write_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


def quantized(tmp_path, layout: str, method: Method, dtype=torch.float32, **changes):
    """Writes a model; gives its folder, and the logits that it should have."""
    model = checkpoint(**changes)
    source = LayerSource(spec_from_config(model.config), model)
    forms, _ = plan_forms(source.spec, parse_layout(layout))
    layers = list(quantize_model(source, forms, method, text(4, 32), torch.device("cpu")))
    write_model(source, forms, layers, tmp_path, dtype, method.static_inputs)
    builder = StoreBuilder(source)
    for layer in layers:
        builder.add(layer)
    return logits_of(source.spec, builder.build(), text(2, 24, seed=5))


def loaded_logits(folder, dtype=torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return model(text(2, 24, seed=5)).logits.float()


def rounded_as_theirs(x, kind, scale=None, ours=calibrate.round_inputs):
    if kind != "int8" or scale is not None:
        return ours(x, kind, scale)
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ("int4-g32", Method("gptq")),
        ("int4-g32-zeros", Method("awq")),
        ("int8", Method()),
        ("w8a8", Method("smoothquant")),
        ("w8a8", Method(static_inputs=True)),
        ("fp8", Method()),
        ("fp8", Method(static_inputs=True)),
        ("int4-g32,lm_head=int8,layers.1=w8a8,layers.0.down=fp32", Method("gptq")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name + ("-static" if value.static_inputs else ""),
)
def test_transformers_computes_the_same_from_what_we_wrote(tmp_path, monkeypatch, layout, method):
    # The library divides a token's range of int8 by 127.5, where vLLM and this engine divide it by 127.
    monkeypatch.setattr(calibrate, "round_inputs", rounded_as_theirs)
    expected = quantized(tmp_path, layout, method)
    got = loaded_logits(tmp_path)
    # An input that lies between two codes may be rounded either way, so inputs in 8 bits leave a little room.
    room = 2e-2 if ("w8a8" in layout or "fp8" in layout) else 1e-4
    assert (got - expected).abs().max() < room * expected.abs().max()
    assert (got - expected).abs().mean() < 1e-3 * expected.abs().max()


def test_the_comparison_would_notice_a_wrong_scale(tmp_path):
    from safetensors.torch import load_file, save_file

    expected = quantized(tmp_path, "int4-g32", Method())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight_scale"] *= 1.05
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (loaded_logits(tmp_path) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_scales_in_bfloat16_are_those_that_codes_were_made_for(tmp_path):
    method = Method("gptq", scale_dtype=torch.bfloat16)
    expected = quantized(tmp_path, "int4-g32", method, torch.bfloat16)
    # Floats beside the codes are rounded to bfloat16, which the expectation is not: close, not equal.
    assert (loaded_logits(tmp_path) - expected).abs().mean() < 2e-2 * expected.abs().max()


def test_packing_is_that_of_the_format():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    generator = torch.Generator().manual_seed(0)
    for bits, columns in ((4, 64), (4, 20), (8, 64), (8, 6)):
        codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (5, columns), generator=generator).to(torch.int8)
        assert torch.equal(pack_int32(codes, bits), pack_to_int32(codes, bits))


@pytest.mark.parametrize("layout", ["int4-g32", "int4-g32-zeros", "int8", "w8a8", "fp8", "int4-g32,layers.1=int8"])
def test_the_engine_reads_the_very_numbers_that_were_written(tmp_path, layout):
    from tokenmill.model.weights.quantized import open_quantized
    from tokenmill.model.weights.safetensors import SafetensorsCheckpoint

    model = checkpoint()
    source = LayerSource(spec_from_config(model.config), model)
    forms, _ = plan_forms(source.spec, parse_layout(layout))
    layers = list(quantize_model(source, forms, Method(), None, torch.device("cpu")))
    write_model(source, forms, layers, tmp_path, torch.float32)
    read = open_quantized(SafetensorsCheckpoint(tmp_path))
    assert sorted(read.names()) == sorted(model.names())
    for layer in layers:
        for short, groups in layer.groups.items():
            for name, part in source.parts(layer.prefix + short):
                assert torch.equal(read.tensor(name), part.of(groups.widen(torch.float32)))
                found = read.groups(name)
                assert torch.equal(found.codes.float(), part.of(groups.codes).float())
                assert torch.equal(found.scale, part.of(groups.scale)) and found.inputs == groups.inputs


def test_the_engine_computes_what_the_quantizer_calibrated_with(tmp_path):
    """Inputs beyond the calibration text's are clipped alike, and their scale is the one in the file."""
    from tokenmill import LLM, SamplingParams

    method = Method("smoothquant", static_inputs=True, scale_dtype=torch.bfloat16)
    expected = quantized(tmp_path, "w8a8", method).log_softmax(-1)
    params, moved = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    with LLM(str(tmp_path), dtype="float64", device="cpu", skip_tokenizer_init=True, max_model_len=64) as llm:
        for row, logprobs in zip(text(2, 24, seed=5).tolist(), expected):
            output = llm.generate([{"prompt_token_ids": row}], params, use_tqdm=False)[0]
            found = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], row[1:])]
            moved += [abs(one - float(at[token])) for one, at, token in zip(found, logprobs, row[1:])]
    # Sums in another order may bring an input that lies between two codes to the other one.
    assert sum(difference > 1e-4 for difference in moved) <= len(moved) // 8
