"""GPTQ against its own definition and against round to nearest."""

from __future__ import annotations

import pytest
import torch

from tokenmill.quant.forms import WeightForm, parse_form
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import GRIDS, decode, encode, find_scales, group_blocks, round_to_nearest
from tokenmill.quant.tool.gptq import gptq, inverse_factor


def case(rows: int = 32, columns: int = 192, tokens: int = 800) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and inputs whose channels differ in size and depend on each other."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + 0.5 * torch.eye(columns)
    inputs = torch.randn(tokens, columns, generator=generator) * torch.rand(columns, generator=generator).pow(2)
    return weight, inputs @ mix


def product_error(weight: torch.Tensor, inputs: torch.Tensor, groups: Groups) -> float:
    return float((inputs @ (groups.widen(torch.float32) - weight).T).square().sum())


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("name", ["int4-g32", "int4-g64-zeros", "int8", "fp8"])
def test_products_are_kept_far_better_than_by_rounding(name, act_order):
    weight, inputs = case()
    form, gram = parse_form(name), inputs.T @ inputs
    groups = gptq(weight, gram, form, act_order=act_order)
    assert groups.group == (form.group or 192)
    importance = group_blocks(gram, form.group) if form.group else gram.diagonal()
    nearest = round_to_nearest(weight, form, True, importance=importance)
    assert product_error(weight, inputs, groups) < 0.6 * product_error(weight, inputs, nearest)


def test_inputs_that_do_not_depend_on_each_other_leave_the_nearest_codes():
    weight, _ = case()
    gram = torch.diag(torch.rand(192, generator=torch.Generator().manual_seed(1)) + 0.1)
    form = parse_form("int4-g32")
    nearest = round_to_nearest(weight, form, True, importance=group_blocks(gram, 32))
    assert torch.equal(gptq(weight, gram, form).codes, nearest.codes)


def one_by_one(weight: torch.Tensor, gram: torch.Tensor, form: WeightForm, order: torch.Tensor) -> torch.Tensor:
    """The definition: round a column, spread its error by the inverse of what is left, leave the column out."""
    damped = gram.double() + 0.01 * gram.diagonal().mean().double() * torch.eye(len(gram), dtype=torch.float64)
    scale, _ = find_scales(weight, form, True, importance=group_blocks(gram, form.group))
    work, codes, left = weight.double().clone(), torch.empty_like(weight), order.tolist()
    while left:
        inverse = damped[left][:, left].inverse()
        column = left[0]
        own = scale[:, column // form.group]
        codes[:, column] = encode(work[:, column], own, None, GRIDS[form.kind]).float()
        error = (work[:, column] - decode(codes[:, column].double(), own, None)) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return codes


def test_codes_are_those_of_the_definition():
    weight, inputs = case(rows=8, columns=160)  # more than one block of columns
    gram, form = inputs.T @ inputs, parse_form("int4-g32")
    expected = one_by_one(weight, gram, form, gram.diagonal().argsort(descending=True))
    got = gptq(weight, gram, form).codes.float()
    # A weight halfway between codes may fall to either side in float32, and takes those behind it along.
    assert (got == expected).float().mean() > 0.97
    assert (round_to_nearest(weight, form, True).codes == expected).float().mean() < 0.9


def test_channels_that_the_text_never_uses_are_rounded_to_nearest():
    weight, inputs = case()
    inputs[:, 40:72] = 0
    form = parse_form("int4-g32")
    groups = gptq(weight, inputs.T @ inputs, form)
    assert groups.scale.isfinite().all()
    step = groups.scale.repeat_interleave(32, 1)
    assert ((groups.widen(torch.float32) - weight)[:, 40:72].abs() <= 8 * step[:, 40:72]).all()


def test_inputs_of_fewer_tokens_than_channels_are_enough_to_go_on():
    weight, inputs = case(tokens=20)
    groups = gptq(weight, inputs.T @ inputs, parse_form("int4-g32"))
    nearest = round_to_nearest(weight, parse_form("int4-g32"))
    assert product_error(weight, inputs, groups) < product_error(weight, inputs, nearest)


def test_the_factor_is_that_of_the_inverse():
    _, inputs = case()
    gram = inputs.T @ inputs
    upper = inverse_factor(gram, 0.01)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(192)
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(192), atol=1e-3)
    assert torch.equal(upper, upper.triu())


def test_moments_that_are_not_finite_are_refused():
    gram = torch.full((32, 32), torch.nan)
    with pytest.raises(ValueError, match="finite"):
        inverse_factor(gram, 0.01)
