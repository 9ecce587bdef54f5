"""Weights rounded for the native CPU kernels: codes survive packing, products are those of the stored numbers."""

from __future__ import annotations

import pytest
import torch
from small_models import checkpoint, write

from tokenmill import LLM, SamplingParams
from tokenmill.ops.native.library import Library, load
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.schemes.packed import Packed, can_hold
from tokenmill.quant.schemes.scheme import Linear

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
CPU = torch.device("cpu")


def stored(form: WeightForm, weight: torch.Tensor) -> torch.Tensor:
    """What a packed matrix holds, read back through products with unit vectors that 8 bits hold exactly."""
    scheme = Packed(form)
    storage = scheme.allocate(*weight.shape, torch.float32, CPU)
    scheme.write(storage, 0, weight)
    return Linear(scheme, storage)(torch.eye(weight.shape[1])).T


FORMS = [
    WeightForm("int8"),
    WeightForm("w8a8"),
    WeightForm("int4"),
    WeightForm("int4", 64),
    WeightForm("int4", 32, zeros=True),
]


@pytest.mark.parametrize("form", FORMS)
def test_floats_are_rounded_as_the_form_says(form):
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(1)) + 0.3
    fine = WeightForm(form.kind, form.group or 32, form.zeros)
    expected = round_to_nearest(weight, fine, scale_dtype=torch.float16).widen(torch.float32)
    got = stored(form, weight)
    # With zeros, blocks hold the smallest weight in float16 rather than the zero's code.
    assert (got - expected).abs().max() < (2e-3 if form.zeros else 1e-5)
    step = 2 * weight.abs().max() / (15 if form.kind == "int4" else 254)
    assert 0 < (got - weight).abs().max() < step


def test_codes_of_a_checkpoint_are_kept():
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-8, 8, (17, 128), generator=generator, dtype=torch.int8)
    scale = torch.rand(17, 2, generator=generator).half()
    for zeros in (None, torch.randint(-8, 8, (17, 2), generator=generator, dtype=torch.int8)):
        groups = Groups(codes, scale, 4, zeros)
        scheme = Packed(WeightForm("int4", 64, zeros is not None))
        storage = scheme.allocate(17, 128, torch.float32, CPU)
        scheme.write_groups(storage, 0, groups)
        got = Linear(scheme, storage)(torch.eye(128)).T
        assert (got - groups.widen(torch.float32)).abs().max() < (1e-6 if zeros is None else 8e-3)


def test_eight_bits_per_row_with_zeros_become_floats():
    codes = torch.randint(-128, 128, (5, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    groups = Groups(codes, torch.full((5, 1), 0.02), 8, torch.full((5, 1), 7, dtype=torch.int8))
    scheme = Packed()
    storage = scheme.allocate(5, 64, torch.float32, CPU)
    scheme.write_groups(storage, 0, groups)
    assert torch.equal(Linear(scheme, storage)(torch.eye(64)).T, groups.widen(torch.float32))


def test_the_bytes_are_the_bytes_planned():
    for form, bits in (
        (WeightForm("int4"), 4.5),
        (WeightForm("int8"), 8.5),
        (WeightForm("int4", 64, zeros=True), 6),
        (WeightForm("bf16"), 16),
    ):
        scheme = Packed(form)
        storage = scheme.allocate(64, 256, torch.float32, CPU)
        scheme.write(storage, 0, torch.randn(64, 256))
        planned = scheme.nbytes(64, 256, torch.float32)
        assert sum(panels.nbytes for panels in storage.values()) == planned
        assert planned <= 64 * 256 * bits / 8


def test_floats_in_panels_that_are_not_full_are_planned_as_they_lie():
    for kind in ("bf16", "fp16", "fp32"):
        for rows, columns in ((40, 40), (17, 33)):  # panels have 16 rows and whole cache lines
            scheme = Packed(WeightForm(kind))
            storage = scheme.allocate(rows, columns, torch.float32, CPU)
            scheme.write(storage, 0, torch.randn(rows, columns))
            assert sum(panels.nbytes for panels in storage.values()) == scheme.nbytes(rows, columns, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.bfloat16, "layers.0=int8"),
        (torch.float16, "layers.0=int8"),
        (torch.float32, "layers.0=int8"),
        (torch.bfloat16, "bf16"),
        (torch.bfloat16, "layers.1=fp32"),
    ],
)
def test_the_plan_holds_what_a_packed_model_of_floats_holds(tmp_path, dtype, quantization):
    model = checkpoint()
    model.tensors = {name: tensor.to(dtype) for name, tensor in model.tensors.items()}
    with LLM(str(write(model, tmp_path / "model")), skip_tokenizer_init=True, device="cpu", max_num_seqs=2,
             quantization=quantization) as llm:  # fmt: skip
        weights, spec = llm._processor.engine.runner.decoder.weights, llm._built.spec
        layers = [weights.layer(index) for index in range(spec.num_layers)]
        linears = [weights.embed, weights.lm_head, *(one for layer in layers for one in layer.linears())]
        norms = [weights.final_norm, *(norm for one in layers for norm in (one.before_attention, one.before_mlp))]
        held = [tensor for linear in linears for tensor in linear.storage.values()] + norms
        assert sum(tensor.nbytes for tensor in held) == llm._built.settings.memory.weights


def test_columns_that_fill_no_block_stay_floats():
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(4))
    assert torch.equal(stored(WeightForm("int4"), weight), weight)
    assert (
        not can_hold(WeightForm("int4", 16), 64)
        and not can_hold(WeightForm("fp8"), 64)
        and can_hold(WeightForm("int8"), 64)
    )


@pytest.mark.parametrize("quantization", ["int8", "int4,layers.0=bf16"])
def test_a_model_of_floats_answers_in_packed_form(tiny_model, quantization):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(tiny_model, quantization=quantization, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5, 9, 14]}], params, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 12
