"""Round to nearest: codes, scales, and the search for scales that clip."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.quant.forms import WeightForm, parse_form
from tokenmill.quant.rounding import GRIDS, find_scales, group_blocks, round_to_nearest
from tokenmill.quant.schemes.row_scaled import Fp8

NAMES = ["int4-g32", "int4-g64", "int4-g128", "int4-g32-zeros", "int8", "w8a8", "fp8"]


def matrix(rows: int = 24, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(weight: torch.Tensor, groups) -> torch.Tensor:
    return (groups.widen(torch.float64) - weight.double()).square().sum()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-6, 1.0, 1e4]), shift=st.sampled_from([0.0, 0.5]))
def test_no_weight_moves_by_more_than_half_a_step(name, seed, size, shift):
    form = parse_form(name)
    weight = (matrix(4, 128, seed) + shift) * size
    groups = round_to_nearest(weight, form)
    step = groups.scale.repeat_interleave(groups.group, 1)
    if form.kind == "fp8":
        step = torch.maximum(weight.abs() / 8, step * 2**-6)  # three bits behind the point; then the smallest ones
    # The far end of four symmetric bits is half a step beyond the last code; zeros are whole codes, so ends shift.
    room = {"int4": 1.01}.get(form.kind, 0.501)
    assert ((groups.widen(torch.float32) - weight).abs() <= room * step).all()
    grid = GRIDS[form.kind]
    assert groups.codes.dtype == grid.dtype
    assert (groups.codes.float() >= grid.low).all() and (groups.codes.float() <= grid.high).all()
    assert groups.bits == grid.bits and (groups.zeros is not None) == form.zeros
    assert groups.inputs == {"w8a8": "int8", "fp8": "fp8"}.get(form.kind)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_on_the_grid_stays_where_it_is(name):
    form = parse_form(name)
    first = round_to_nearest(matrix(), form)
    on_grid = first.widen(torch.float32)
    again = round_to_nearest(on_grid, form, clip_search=True)
    assert torch.allclose(again.widen(torch.float32), on_grid, rtol=1e-5, atol=1e-6)


def test_float8_is_what_the_engine_makes_of_the_same_rows():
    scheme, ours = Fp8(), round_to_nearest(matrix(), WeightForm("fp8"))
    storage = scheme.allocate(*matrix().shape, torch.float32, torch.device("cpu"))
    scheme.write(storage, 0, matrix())
    assert torch.equal(ours.codes.float(), storage["weight"].float())
    assert torch.equal(ours.scale[:, 0], storage["scale"].flatten())


@pytest.mark.parametrize("name", NAMES)
def test_the_search_never_makes_a_group_worse(name):
    form, weight = parse_form(name), matrix()
    plain, searched = round_to_nearest(weight, form), round_to_nearest(weight, form, clip_search=True)

    def by_group(groups):
        return (groups.widen(torch.float32) - weight).square().view(24, -1, groups.group).sum(-1)

    assert (by_group(searched) <= by_group(plain) * (1 + 1e-5)).all()
    if form.kind == "int4":
        assert by_group(searched).sum() < 0.95 * by_group(plain).sum()


def test_the_search_follows_the_inputs():
    weight, form = matrix(), parse_form("int4-g32")
    inputs = matrix(500, 256, seed=1) * torch.linspace(0.1, 3, 256).pow(2)
    inputs[:, ::2] += inputs[:, 1::2]
    gram = inputs.T @ inputs

    def product_error(groups) -> float:
        return float((inputs @ (groups.widen(torch.float32) - weight).T).square().sum())

    blind = product_error(round_to_nearest(weight, form, True))
    by_column = product_error(round_to_nearest(weight, form, True, importance=gram.diagonal()))
    by_group = product_error(round_to_nearest(weight, form, True, importance=group_blocks(gram, 32)))
    assert by_column < blind
    assert by_group < 0.97 * blind


def test_the_blocks_of_a_gram_matrix_are_those_of_its_groups():
    gram = matrix(64, 64)
    blocks = group_blocks(gram, 16)
    for number in range(4):
        own = slice(16 * number, 16 * number + 16)
        assert torch.equal(blocks[number], gram[own, own])


def test_codes_are_made_for_the_scales_that_are_stored():
    weight, form = matrix(), parse_form("int4-g32")
    groups = round_to_nearest(weight, form, scale_dtype=torch.bfloat16)
    assert groups.scale.dtype == torch.bfloat16
    exact = round_to_nearest(weight, form)
    later = (exact.codes.float().view(24, -1, 32) * groups.scale.float()[..., None]).flatten(1)
    assert error(weight, groups) < (later - weight).square().sum()


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_stay_zeros(name):
    weight = matrix()
    weight[3] = 0
    groups = round_to_nearest(weight, parse_form(name), clip_search=True)
    assert (groups.widen(torch.float32)[3] == 0).all()
    assert groups.scale.isfinite().all() and (groups.scale > 0).all()


def test_rows_can_be_rounded_in_parts():
    weight, form = matrix(48), parse_form("int4-g32-zeros")
    scale, zeros = find_scales(weight, form, True)
    parts = [find_scales(part, form, True) for part in (weight[:20], weight[20:])]
    assert torch.equal(scale, torch.cat([part for part, _ in parts]))
    assert torch.equal(zeros, torch.cat([part for _, part in parts]))


def test_a_group_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(ConfigError, match=r"multiple of 128.*96.*g32"):
        round_to_nearest(matrix(4, 96), parse_form("int4-g128"))
    with pytest.raises(ConfigError, match="no quantized form"):
        round_to_nearest(matrix(), parse_form("bf16"))
