"""Weight-only forms: what is stored is what was written, and products are those of the stored numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tokenmill.errors import ConfigError
from tokenmill.ops.types import QuantizedRows
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.schemes.scheme import Linear, TakesGroups
from tokenmill.quant.schemes.weight_only import WeightOnly, why_not

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
FORMS = [
    *(WeightForm("int4", group, zeros) for group, zeros in itertools.product((32, 64, 128), (False, True))),
    WeightForm("int8"),
    WeightForm("int8", 64),
    WeightForm("fp8", 128),
]
SHAPES = [(5, 128), (48, 384), (16, 1024), (4, 640), (16, 96 * 4)]  # some in tiles, some in plain order


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_groups(rows: int, columns: int, form: WeightForm, scale_dtype: torch.dtype = torch.float32) -> Groups:
    """Every code occurs, and scales that no other dtype can hold."""
    generator = torch.Generator().manual_seed(rows * columns)
    count = columns // (form.group or columns)
    scale = (torch.rand(rows, count, generator=generator) + 0.1).to(scale_dtype)
    if form.kind == "fp8":
        codes = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(FLOAT8)
        return Groups(codes, scale, 8)
    low, high = (-8, 8) if form.kind == "int4" else (-128, 128)
    codes = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (rows, count), generator=generator, dtype=torch.int8) if form.zeros else None
    return Groups(codes, scale, 4 if form.kind == "int4" else 8, zeros)


def stored(groups: Groups, form: WeightForm) -> Linear:
    scheme = WeightOnly(form)
    storage = scheme.allocate(*groups.codes.shape, torch.float32, CPU)
    scheme.write_groups(storage, 0, groups)
    return Linear(scheme, storage)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scales_and_zeros_of_a_checkpoint_are_kept_exactly(shape, scale_dtype, form):
    groups = random_groups(*shape, form, scale_dtype)
    layer = stored(groups, form)
    assert isinstance(layer.scheme, TakesGroups)
    back = layer.scheme.groups(layer.storage)
    assert torch.equal(back.codes.view(torch.uint8), groups.codes.view(torch.uint8))
    assert torch.equal(back.scale, groups.scale.float())
    assert back.zeros is None if groups.zeros is None else torch.equal(back.zeros, groups.zeros)
    assert (back.bits, back.group) == (groups.bits, groups.group)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plan_counts_the_bytes_that_are_allocated(shape, form):
    scheme = WeightOnly(form)
    storage = scheme.allocate(*shape, torch.bfloat16, CPU)
    assert sum(tensor.nbytes for tensor in storage.values()) == scheme.nbytes(*shape, torch.bfloat16)
    assert scheme.scratch_bytes(*shape, torch.bfloat16) == 2 * shape[0] * shape[1]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_written_weights_are_rounded_to_nearest_in_any_order_of_pieces(form, monkeypatch):
    weight = randn(48, 256) * torch.logspace(-3, 2, 48)[:, None]
    monkeypatch.setattr("tokenmill.quant.schemes.weight_only._CHUNK", 7 * 256)
    scheme = WeightOnly(form)
    storage = scheme.allocate(48, 256, torch.float32, CPU)
    for first, last in ((30, 48), (0, 11), (11, 30)):
        scheme.write(storage, first, weight[first:last])
    expected = round_to_nearest(weight, form)
    got = scheme.groups(storage)
    assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(got.widen(torch.float32), expected.widen(torch.float32))
    error = (got.widen(torch.float32) - weight).abs().reshape(48, -1, got.group).amax(-1)
    # Half a step (of float8: of its largest numbers); of four bits the last code, or a rounded zero, may cost more.
    step = got.scale * (32 if form.kind == "fp8" else 1)
    assert (error <= step * (1.001 if form.kind == "int4" else 0.501)).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_products_are_those_of_the_stored_numbers(rows, dtype, form):
    groups = random_groups(32, 384, form)
    x, bias = randn(rows, 384, seed=1).to(dtype), randn(32, seed=2).to(dtype)
    layer = stored(groups, form)
    expected = F.linear(x.double(), groups.widen(torch.float64), bias.double())
    got = Linear(layer.scheme, layer.storage, bias)(x)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=expected.abs().max().item() * 16 * unit)
    nested = Linear(layer.scheme, layer.storage, bias)(x.view(1, rows, 384))
    assert torch.equal(nested[0], got)


def test_inputs_that_are_float8_already_are_widened():
    groups = random_groups(8, 128, WeightForm("int8"))
    x = QuantizedRows(randn(3, 128).to(FLOAT8), torch.tensor([1.0, 2.0, 0.5]), torch.float32)
    layer = stored(groups, WeightForm("int8"))
    torch.testing.assert_close(layer(x), F.linear(x.widen(), groups.widen(torch.float32)))


def test_scales_coarser_than_the_groups_are_repeated():
    form = WeightForm("int4", 32, True)
    coarse = random_groups(6, 256, WeightForm("int4", 128, True))
    layer = stored(coarse, form)
    assert torch.equal(layer.scheme.groups(layer.storage).widen(torch.float32), coarse.widen(torch.float32))
    symmetric = random_groups(6, 256, WeightForm("int4", 128))
    layer = stored(symmetric, form)  # zeros of zero
    assert torch.equal(layer.scheme.groups(layer.storage).widen(torch.float32), symmetric.widen(torch.float32))


def test_codes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="8-bit codes"):
        stored(random_groups(4, 128, WeightForm("int8")), WeightForm("int4", 128))
    with pytest.raises(ConfigError, match="8-bit codes"):
        stored(random_groups(4, 128, WeightForm("fp8", 128)), WeightForm("int8"))
    with pytest.raises(ConfigError, match="zeros"):
        stored(random_groups(4, 128, WeightForm("int4", 128, True)), WeightForm("int4", 128))
    with pytest.raises(ConfigError, match="scales a row"):
        stored(random_groups(4, 256, WeightForm("int4", 64)), WeightForm("int4", 128))


def test_sizes_that_do_not_fit_are_refused_with_what_fits():
    assert why_not(10, 4096, WeightForm("int4", 128)) is None
    assert "take int4-g64" in (why_not(10, 576, WeightForm("int4", 128)) or "")
    assert "take int8" in (why_not(10, 100, WeightForm("int4", 32)) or "")
    assert "bf16" in (why_not(10, 33, WeightForm("int8")) or "")
    with pytest.raises(ConfigError, match=r"10 x 576 cannot be int4-g128: its 576 inputs"):
        WeightOnly(WeightForm("int4", 128)).allocate(10, 576, torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="w8a8 is not a weight-only form"):
        WeightOnly(WeightForm("w8a8"))
