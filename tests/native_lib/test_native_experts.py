"""Routing and products of packed experts, against the plain ops on floats and on what packed forms stand for."""

from __future__ import annotations

import pytest
import torch

from tokenmill.model.moe import route as plain_route
from tokenmill.model.spec import MoESpec
from tokenmill.offload.expert_slots import Told
from tokenmill.ops import reference
from tokenmill.ops.native import library
from tokenmill.ops.native.experts import moe_packed, route, route_args
from tokenmill.ops.native.layer_wait import check_told
from tokenmill.ops.native.recording import NotRecordableError
from tokenmill.ops.native.structs import Args
from tokenmill.plan.solve.offload import MOST
from tokenmill.quant.forms import parse_form
from tokenmill.quant.schemes.experts import Experts, allocate_experts, moe_each
from tokenmill.quant.schemes.packed import Packed

EXPERTS, TOP_K, HIDDEN, INNER = 6, 3, 96, 64
CPU = torch.device("cpu")


def experts_of(weights: torch.Tensor, form: str | None) -> Experts:  # [experts, rows, columns]
    made = allocate_experts(Packed(None if form is None else parse_form(form)), *weights.shape, torch.float32, CPU)
    for expert, weight in enumerate(weights):  # in two parts, as checkpoints hold gate and up
        half = len(weight) // 2
        for first, part in ((0, weight[:half]), (half, weight[half:])):
            made.scheme.write(made.storages[expert], first, part)
    return made


def stands_for(experts: Experts) -> torch.Tensor:
    return torch.stack([one.matrix.take_rows(torch.arange(one.matrix.rows)) for one in experts.storages])


def layer(form: str | None, dtype: torch.dtype = torch.float32) -> tuple[Experts, Experts]:
    made = torch.Generator().manual_seed(3)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    drawn = [torch.randn(shape, generator=made) * shape[-1] ** -0.5 for shape in shapes]
    return experts_of(drawn[0].to(dtype), form), experts_of(drawn[1].to(dtype), form)


def choices(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=made)
    scores[:, 4] = -9  # nobody's
    shares, experts = scores.softmax(-1).topk(TOP_K)
    return torch.randn(tokens, HIDDEN, generator=made), shares, experts


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_give_what_the_plain_op_gives(level: int, tokens: int, dtype: torch.dtype) -> None:
    gate_up, down = layer(None, dtype)
    x, shares, experts = choices(tokens)
    for kind in ("silu", "gelu_tanh"):
        found = moe_packed(x, shares, experts, gate_up.operand, down.operand, kind)
        expected = reference.moe(x, shares, experts, stands_for(gate_up), stands_for(down), kind)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("form", ["int8", "int4-g32", "int4-g32-zeros", "w8a8"])
def test_packed_forms_give_what_the_products_of_linear_layers_give(level: int, tokens: int, form: str) -> None:
    gate_up, down = layer(form)
    x, shares, experts = choices(tokens)
    found = moe_packed(x, shares, experts, gate_up.operand, down.operand, "silu")
    each = moe_each(x, shares, experts, gate_up, down, "silu")  # whose activation is torch's: codes may differ by one
    torch.testing.assert_close(found, each, atol=2e-2 * float(each.abs().max()), rtol=0)
    assert float((found - each).norm() / each.norm()) < 2e-3
    floats = reference.moe(x, shares, experts, stands_for(gate_up), stands_for(down), "silu")
    assert float((found - floats).norm() / floats.norm()) < 0.02  # inputs are rounded to 8 bits


@pytest.mark.parametrize("form", [None, "int8", "int4-g32"])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(
    native: library.Library, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = layer(form)
    x, shares, experts = choices(150)
    before, found = native.threads, []
    try:
        for threads in (1, 3):
            native.threads = threads
            found.append(moe_packed(x, shares, experts, gate_up.operand, down.operand, "silu"))
    finally:
        native.threads = before
    assert torch.equal(*found)
    for rows in (slice(0, 1), slice(70, 77), slice(130, 150)):
        some = moe_packed(x[rows], shares[rows], experts[rows], gate_up.operand, down.operand, "silu")
        assert torch.equal(some, found[0][rows])


def test_choices_of_experts_that_are_not_there_add_nothing(native: library.Library) -> None:
    gate_up, down = layer(None)
    x, shares, experts = choices(9)
    some, rest = experts.clone(), shares.clone()
    some[2, 0], some[5] = EXPERTS, -1
    rest[2, 0], rest[5] = 0, 0
    found = moe_packed(x, shares, some, gate_up.operand, down.operand, "silu")
    expected = moe_packed(x, rest, experts, gate_up.operand, down.operand, "silu")
    torch.testing.assert_close(found, expected)
    assert not found[5].any()


def test_inputs_that_are_not_finite_spoil_their_own_rows(native: library.Library) -> None:
    for form in (None, "int4-g32"):
        gate_up, down = layer(form)
        x, shares, experts = choices(6)
        x[4, 7] = float("nan")
        found = moe_packed(x, shares, experts, gate_up.operand, down.operand, "silu")
        assert found[4].isnan().all() and found[[0, 1, 2, 3, 5]].isfinite().all()


def test_experts_are_not_multiplied_before_they_are_whole(native: library.Library) -> None:
    made = allocate_experts(Packed(), 2, 32, 64, torch.float32, CPU)
    made.scheme.write(made.storages[0], 0, torch.randn(32, 64))
    with pytest.raises(ValueError, match="before all of their rows"):
        _ = made.operand.table


ROUTES = {
    "mixtral": MoESpec((True,), 8, 2, 1, normalize=True),
    "plain": MoESpec((True,), 21, 4, 1, scale=2.5),
    "groups": MoESpec((True,), 24, 5, 1, groups=6, top_groups=2, scale=16.0),
    "all": MoESpec((True,), 5, 5, 1, normalize=True),
}


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("case", ROUTES)
def test_routes_are_those_of_the_plain_router(level: int, case: str, tokens: int) -> None:
    moe = ROUTES[case]
    made = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 50, generator=made)
    router = torch.randn(moe.experts, 50, generator=made) * 0.3
    shares, experts = route(x, router, moe.top_k, moe.normalize, moe.scale, moe.groups, moe.top_groups)
    expected, chosen = plain_route(x @ router.T, moe)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(shares, expected, rtol=2e-5, atol=1e-6)


def test_scores_that_are_not_finite_make_a_row_so(native: library.Library) -> None:
    x = torch.randn(3, 16)
    x[1, 3] = float("nan")
    shares, experts = route(x, torch.randn(6, 16), 2, True, 1.0)
    assert shares[1].isnan().all() and shares[[0, 2]].isfinite().all()
    assert ((experts >= 0) & (experts < 6)).all()


def test_every_kind_of_op_is_one_ops() -> None:
    kinds = [struct.KIND for struct in Args.__subclasses__()]
    assert len(kinds) == len(set(kinds))


def test_numbers_that_steps_tell_are_the_same_on_both_sides() -> None:
    check_told(len(Told), MOST)
    for numbers, most in ((len(Told) + 1, MOST), (len(Told), 0.5)):
        with pytest.raises(ValueError, match="steps tell"):
            check_told(numbers, most)


def test_a_router_with_gaps_is_routed_as_one_without() -> None:
    made = torch.Generator().manual_seed(5)
    x, router = torch.randn(7, HIDDEN, generator=made), torch.randn(HIDDEN, EXPERTS, generator=made).t()
    for found, expected in zip(route(x, router, TOP_K, True, 1.0), route(x, router.contiguous(), TOP_K, True, 1.0)):
        assert torch.equal(found, expected)


def test_what_cannot_be_routed_where_it_lies_is_not_recorded() -> None:
    x, router = torch.zeros(4, HIDDEN), torch.zeros(EXPERTS, HIDDEN)
    shares, chosen = torch.zeros(4, TOP_K), torch.zeros(4, TOP_K, dtype=torch.int64)
    for rows, weights in ((torch.zeros(HIDDEN, 4).t(), router), (x, torch.zeros(HIDDEN, EXPERTS).t())):
        with pytest.raises(NotRecordableError, match="cannot be routed where they lie"):
            route_args(rows, weights, shares, chosen, True, 1.0, 1, 1)
    with pytest.raises(TypeError, match="float64"):
        route_args(x, router.double(), shares, chosen, True, 1.0, 1, 1)
