"""Blocks of every GGUF format become floats, and floats become blocks, bit for bit as their definitions say."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from blocks import BLOCKS, meaning, packed, random_blocks
from gguf.quants import _type_traits

from tokenmill.errors import ModelError
from tokenmill.ops.native.blocks import book_of, rounded, unpack
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.library import Library
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.schemes.packed import blocks_of

ROWS, COLUMNS = 21, 512


def edge_blocks(id: int) -> np.ndarray:
    """Rows of zeros, of ones, and of random blocks, some with a scale of zero."""
    format = OF_GGUF[id]
    raw = random_blocks(id, ROWS, COLUMNS, np.random.default_rng(id))
    raw[0] = 0
    # All codes and small scales at their most; floats stay what they are.
    ones, known = np.full_like(raw[1], 255), random_blocks(id, 1, COLUMNS, np.random.default_rng(1))[0]
    float_bytes = {"IQ1_M": range(49, 56, 2), "MXFP4": range(1), "NVFP4": range(4)}.get(format.name, _scales(id))
    for at in float_bytes:
        ones[at :: format.size] = known[at :: format.size]
        raw[2, at :: format.size] = 0
    raw[1] = ones
    return raw


def _scales(id: int) -> list[int]:
    from blocks import _HALVES

    return [byte for at in _HALVES[id] for byte in (at, at + 1)]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def test_every_format_that_the_gguf_package_decodes_is_here() -> None:
    floats = {int(gguf.GGMLQuantizationType.F32), int(gguf.GGMLQuantizationType.F16)}
    assert set(OF_GGUF) == floats | {int(kind) for kind in _type_traits}
    for id, format in OF_GGUF.items():
        kind = gguf.GGMLQuantizationType(id)
        assert (format.name, (format.values, format.size)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_become_the_floats_of_the_gguf_package(name: str, level: int, native: Library) -> None:
    id = BLOCKS[name]
    raw = edge_blocks(id)
    expected = meaning(raw, id)
    assert expected.isfinite().all() and expected[1:].any(dim=1).sum() > ROWS - 4
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = unpack(native, raw.reshape(-1), OF_GGUF[id], ROWS, COLUMNS, dtype=dtype)
        assert torch.equal(bits(found), bits(expected.to(dtype)))


@pytest.mark.parametrize("name", BLOCKS)
def test_panels_hold_the_same_numbers_in_another_order_of_rows(name: str, level: int, native: Library) -> None:
    id = BLOCKS[name]
    raw, order = edge_blocks(id), np.random.default_rng(0).permutation(ROWS).astype(np.int32)
    expected = meaning(raw, id)[torch.from_numpy(order).long()]
    assert torch.equal(packed(raw, id, order).take_rows(torch.arange(ROWS)), expected)
    assert torch.equal(unpack(native, raw.reshape(-1), OF_GGUF[id], ROWS, COLUMNS, order), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_rows_are_converted_as_torch_does(dtype: torch.dtype, level: int, native: Library) -> None:
    weight = torch.randn(ROWS, 75, generator=torch.Generator().manual_seed(0))
    weight[3, 4], weight[5, 6] = 1e-7, float("inf")
    for stored, id in ((torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 30)):
        raw = weight.to(stored).view(torch.uint8).numpy().reshape(-1)
        found = unpack(native, raw, OF_GGUF[id], ROWS, 75, dtype=dtype)
        assert torch.equal(bits(found), bits(weight.to(stored).to(dtype)))


def test_a_format_whose_book_is_not_here_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ModelError, match="GGUF format IQ2_S needs the gguf package"):
        book_of.__wrapped__(OF_GGUF[22])


def test_blocks_that_do_not_fit_their_shape_are_refused(native: Library) -> None:
    raw, format = np.zeros(4 * 34, dtype=np.uint8), OF_GGUF[8]
    for rows, columns in ((5, 32), (4, 64), (4, 31)):
        with pytest.raises(ValueError, match="Q8_0"):
            unpack(native, raw, format, rows, columns)
    with pytest.raises(ValueError, match="order"):
        unpack(native, raw, format, 4, 32, np.array([0, 1, 2, 4], dtype=np.int32))


@pytest.mark.parametrize("form", ["int4-32", "int4-64", "int4-128", "int4-32-zeros", "int4-128-zeros", "int8-32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_has_the_bits_of_the_definition(form: str, dtype: torch.dtype, level: int, native: Library) -> None:
    kind, group, *zeros = form.split("-")
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[0] = 0
    weight[1, :32] = 0
    weight[2] *= 1e-6  # scales below the least that 16 bits have
    weight[3], weight[4] = weight[3].abs(), -weight[4].abs()
    weight[5] = torch.arange(COLUMNS) / 8  # many half way between two codes
    weight = weight.to(dtype)
    wanted = WeightForm(kind, int(group), bool(zeros))
    expected = blocks_of(round_to_nearest(weight, wanted, scale_dtype=torch.float16))
    found = rounded(native, weight, OF_GGUF[expected.type_id], int(group))
    assert np.array_equal(found, expected.raw)


def test_a_weight_that_is_no_number_spoils_its_group(native: Library) -> None:
    weight = torch.ones(2, 64)
    weight[1, 40] = float("nan")
    found = unpack(native, rounded(native, weight, OF_GGUF[2], 32), OF_GGUF[2], 2, 64)
    assert found[0].isfinite().all() and found[1, :32].isfinite().all() and found[1, 32:].isnan().all()
