"""What adapters add to products: the native op and the Triton kernels against plain torch, recorded or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.ops.native import library
from tokenmill.ops.reference_low_rank import NO_ADAPTER, add_low_rank

native = pytest.mark.skipif(isinstance(library.load(), str), reason="needs the native library")
SHAPES = [  # columns, ends of sections, rank
    (33, (20,), 1),
    (64, (48, 64, 80), 5),
    (50, (31, 62), 16),
    (96, (300, 601), 8),
]
SLOTS = 4


def case(tokens: int, columns: int, ends: tuple[int, ...], rank: int, seed: int = 0) -> dict[str, Any]:
    """Some adapters use fewer ranks, one none at all; rows as a step may have them."""
    make = torch.Generator().manual_seed(seed)
    ranks = torch.tensor([rank, max(1, rank // 2), 0, rank])
    down = torch.randn(SLOTS, len(ends), rank, columns, generator=make)
    up = torch.randn(SLOTS, rank, ends[-1], generator=make)
    for slot, used in enumerate(ranks.tolist()):
        up[slot, used:] = 0
        down[slot, :, used:] = float("nan")  # nobody reads what is not used
    adapter = torch.randint(-1, SLOTS, (tokens,), generator=make)
    adapter[tokens // 2 :] = adapter[-1].item()  # a prompt's tokens have one
    return {
        "out": torch.randn(tokens, ends[-1], generator=make),
        "x": torch.randn(tokens, columns, generator=make),
        "adapter": adapter,
        "down": down.flatten(1, 2),
        "up": up,
        "ranks": ranks,
        "ends": ends,
    }


def by_hand(of: dict[str, Any]) -> torch.Tensor:
    """One token, one section at a time, in float64."""
    out, rank = of["out"].double().clone(), of["up"].shape[1]
    for token, slot in enumerate(of["adapter"].tolist()):
        used = 0 if slot == NO_ADAPTER else int(of["ranks"][slot])
        for section, (first, last) in enumerate(zip((0, *of["ends"][:-1]), of["ends"], strict=True)):
            if used:
                down = of["down"][slot, section * rank : section * rank + used].double()
                out[token, first:last] += (down @ of["x"][token].double()) @ of["up"][slot, :used, first:last].double()
    return out


def check(op: Callable[..., torch.Tensor], of: dict[str, Any]) -> None:
    before = of["out"].clone()
    wanted = by_hand(of)
    found = op(*of.values())
    assert found.data_ptr() == of["out"].data_ptr()
    assert torch.allclose(found.double(), wanted, atol=1e-4, rtol=1e-4)
    alone = of["adapter"] == NO_ADAPTER
    assert torch.equal(found[alone], before[alone]), "rows without an adapter stay bit for bit"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 41])
def test_the_reference_is_what_is_written_by_hand(tokens: int, shape: tuple[int, tuple[int, ...], int]) -> None:
    check(add_low_rank, case(tokens, *shape))


@native
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 41])
def test_the_native_op_is_the_reference(tokens: int, shape: tuple[int, tuple[int, ...], int]) -> None:
    from tokenmill.ops.native.low_rank import add_low_rank as op

    for seed in range(3):
        check(op, case(tokens, *shape, seed=seed))


@native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_native_op_reads_factors_of_16_bits(dtype: torch.dtype, shape: tuple[int, tuple[int, ...], int]) -> None:
    from tokenmill.ops.native.low_rank import add_low_rank as op

    for tokens in (1, 9):
        of = case(tokens, *shape)
        check(op, of | {"down": of["down"].to(dtype), "up": of["up"].to(dtype)})


@native
def test_the_native_op_takes_strided_rows_and_nobodys_tokens() -> None:
    from tokenmill.ops.native.low_rank import add_low_rank as op

    of = case(6, *SHAPES[1])
    of["x"] = torch.cat([of["x"], of["x"]], dim=1)[:, : of["x"].shape[1]]
    check(op, of)
    of["adapter"] = torch.full((6,), NO_ADAPTER)
    check(op, of)
    with pytest.raises(TypeError, match="float64"):
        op(*(one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in of.values()))


@native
@settings(deadline=None, max_examples=60)
@given(
    adapter=st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=70),
    columns=st.integers(1, 130),
    widths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    rank=st.integers(1, 35),
)
def test_the_native_op_takes_any_order_of_adapters(
    adapter: list[int], columns: int, widths: list[int], rank: int
) -> None:
    from tokenmill.ops.native.low_rank import add_low_rank as op

    of = case(len(adapter), columns, tuple(accumulate(widths)), rank)
    check(op, of | {"adapter": torch.tensor(adapter)})


@native
@pytest.mark.parametrize("shape", [*SHAPES, (100, (130,), 19)])
def test_what_a_row_gets_does_not_depend_on_the_rows_beside_it(shape: tuple[int, tuple[int, ...], int]) -> None:
    """To the last bit: whatever order and number of rows have its adapter."""
    from tokenmill.ops.native.low_rank import add_low_rank as op

    of = case(23, *shape)
    of["adapter"] = torch.arange(23) % 5 - 1  # tiles of one to five rows
    of["adapter"][7:12] = 3
    together = op(**of | {"out": of["out"].clone()})
    for token in range(23):
        alone = {name: of[name][token : token + 1].clone() for name in ("out", "x", "adapter")}
        assert torch.equal(op(**of | alone)[0], together[token]), token


@native
def test_it_is_recorded_once_for_any_number_of_rows() -> None:
    from tokenmill.ops.native.low_rank import add_low_rank as op
    from tokenmill.ops.native.recording import RecordedGraph

    static = case(16, *SHAPES[1])
    graph = RecordedGraph(16)
    with graph.record():
        op(*static.values())
    for tokens, seed in ((5, 1), (16, 2), (1, 3)):
        of = case(tokens, *SHAPES[1], seed=seed) | {name: static[name] for name in ("down", "up", "ranks")}
        for name in ("out", "x", "adapter"):
            static[name][:tokens] = of[name]
        rest = static["out"][tokens:].clone()
        graph.run(tokens)
        assert torch.allclose(static["out"][:tokens].double(), by_hand(of), atol=1e-4)
        assert torch.equal(static["out"][tokens:], rest)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 37])
@pytest.mark.parametrize("few", [128, 4])  # tokens are programs of their own, or tiles
def test_the_kernels_are_the_reference(
    tokens: int, shape: tuple[int, tuple[int, ...], int], few: int, triton_device: str, monkeypatch: Any
) -> None:
    from tokenmill.ops.triton import low_rank

    monkeypatch.setattr(low_rank, "FEW", few)
    of = case(tokens, *shape, seed=tokens)
    on_device = {name: one.to(triton_device) if isinstance(one, torch.Tensor) else one for name, one in of.items()}
    before, wanted = of["out"].clone(), by_hand(of)
    found = low_rank.add_low_rank(*on_device.values())
    assert torch.allclose(found.double().cpu(), wanted, atol=1e-4, rtol=1e-4)
    alone = of["adapter"] == NO_ADAPTER
    assert torch.equal(found.cpu()[alone], before[alone])


def test_the_kernels_round_narrow_types_once(triton_device: str) -> None:
    from tokenmill.ops.triton.low_rank import add_low_rank as op

    of = case(40, *SHAPES[2])
    narrow = {
        n: one.bfloat16() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for n, one in of.items()
    }
    wanted = by_hand(narrow)
    on_device = {name: one.to(triton_device) if isinstance(one, torch.Tensor) else one for name, one in narrow.items()}
    found = op(*on_device.values())
    assert torch.allclose(found.double().cpu(), wanted, atol=0.02 * float(wanted.abs().max()), rtol=0.01)
