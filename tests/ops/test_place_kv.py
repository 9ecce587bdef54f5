"""Keys and values copied to another place: what would have been written there, in every form and on every device."""

from __future__ import annotations

import pytest
import torch

from tokenmill.engine.runner.placing import _turns
from tokenmill.model.rope import rope_table
from tokenmill.model.spec import RopeSpec
from tokenmill.ops import reference
from tokenmill.ops.kv_forms import KV_FORMS, KVScales, dequantize
from tokenmill.ops.reference_place import place_kv

TOKENS, HEADS, BLOCKS, SIZE = 23, 3, 12, 4
YARN = RopeSpec(dim=16, theta=1e4, kind="yarn", factor=4.0, original_positions=64, attention_factor=1.2)
ROPES = [RopeSpec(dim=16, theta=1e4), RopeSpec(dim=8, theta=500.0), YARN]


def written(
    rope: RopeSpec, first: int, slots: torch.Tensor, dtype: torch.dtype, form: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, KVScales | None]:
    """A cache with the same tokens' keys and values from position `first` on."""
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, TOKENS, HEADS, 16, generator=generator).to(dtype)
    scales = None
    caches = torch.zeros(2, BLOCKS, SIZE, HEADS, 16, dtype=dtype)
    if form is not None:
        kind = KV_FORMS[form]
        caches = torch.zeros(2, BLOCKS, SIZE, HEADS, kind.width(16)).to(kind.dtype)
        scales = KVScales(*torch.zeros(2, BLOCKS, SIZE, HEADS, kind.scales(16), dtype=torch.bfloat16))
    table, positions = rope_table(rope, 256, torch.device("cpu")), torch.arange(first, first + TOKENS)
    reference.rope_kv_write(k[:, :1].clone(), k, v, table, positions, caches[0], caches[1], slots, scales=scales)
    return caches[0], caches[1], scales


def slots(seed: int) -> torch.Tensor:
    """Of one half of the blocks, in any order."""
    order = torch.randperm(BLOCKS * SIZE // 2, generator=torch.Generator().manual_seed(seed))
    return order[:TOKENS] + seed * BLOCKS * SIZE // 2


def at(cache: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return cache[where // SIZE, where % SIZE]


@pytest.mark.parametrize("rope", ROPES, ids=["plain", "partial", "yarn"])
@pytest.mark.parametrize(("source", "target"), [(1, 150), (150, 1), (40, 40)])
@pytest.mark.parametrize("device", ["cpu", "triton"])
def test_a_copied_key_is_the_key_of_its_new_place(
    rope: RopeSpec, source: int, target: int, device: str, request: pytest.FixtureRequest
) -> None:
    place, where = place_kv, torch.device("cpu")
    if device == "triton":
        pytest.importorskip("triton")
        where = torch.device(request.getfixturevalue("triton_device"))
        from tokenmill.ops.triton.place import place_kv as place
    k, v, _ = written(rope, source, slots(0), torch.float32)
    wanted_k, wanted_v, _ = written(rope, target, slots(1), torch.float32)
    table = rope_table(rope, 256, torch.device("cpu"))
    turns = _turns(table, rope.attention_factor, torch.tensor([7, target - source]))
    before = at(k, slots(0)).clone()
    k, v = k.to(where), v.to(where)
    turn = torch.ones(TOKENS, dtype=torch.int64)
    place(k, v, turns.to(where), turn.to(where), slots(0).to(where), slots(1).to(where))
    torch.testing.assert_close(at(k.cpu(), slots(1)), at(wanted_k, slots(1)), atol=2e-5, rtol=0)
    assert torch.equal(at(v.cpu(), slots(1)), at(wanted_v, slots(1)))
    assert torch.equal(at(k.cpu(), slots(0)), before), "what is copied from stays"
    if source != target:
        assert (at(k.cpu(), slots(1)) - before).abs().max() > 0.1, "the turn is no small thing"


@pytest.mark.parametrize("form", list(KV_FORMS))
def test_codes_of_values_stay_and_those_of_keys_are_made_anew(form: str) -> None:
    rope = ROPES[0]
    k, v, scales = written(rope, 3, slots(0), torch.float32, form)
    wanted, _, wanted_scales = written(rope, 130, slots(1), torch.float32, form)
    assert scales is not None and wanted_scales is not None
    turns = _turns(rope_table(rope, 256, torch.device("cpu")), 1.0, torch.tensor([127]))
    place_kv(k, v, turns, torch.zeros(TOKENS, dtype=torch.int64), slots(0), slots(1), scales)
    assert torch.equal(at(v, slots(1)).view(torch.uint8), at(v, slots(0)).view(torch.uint8))
    assert torch.equal(at(scales.v, slots(1)), at(scales.v, slots(0)))
    found = dequantize(at(k, slots(1)), at(scales.k, slots(1)), torch.float32)
    exact = dequantize(at(wanted, slots(1)), at(wanted_scales.k, slots(1)), torch.float32)
    step = {"int8": 1 / 127, "fp8": 1 / 14, "int4": 1 / 7}[form]  # of what is largest: the coarsest distance of codes
    assert (found - exact).abs().max() < 2 * step * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_rounds_as_the_reference(dtype: torch.dtype, triton_device: str) -> None:
    from tokenmill.ops.triton.place import place_kv as kernel

    k, v, _ = written(ROPES[1], 5, slots(0), dtype)
    turns = _turns(rope_table(ROPES[1], 256, torch.device("cpu")), 1.0, torch.tensor([60, -4]))
    turn = torch.arange(TOKENS) % 2
    wanted = k.clone(), v.clone()
    place_kv(*wanted, turns, turn, slots(0), slots(1))
    k, v = k.to(triton_device), v.to(triton_device)
    kernel(k, v, *(one.to(triton_device) for one in (turns, turn, slots(0), slots(1))))
    torch.testing.assert_close(k.cpu(), wanted[0], atol=1e-2, rtol=1e-2)
    assert torch.equal(v.cpu(), wanted[1])
