"""Products of packed matrices equal those of their meaning, in every format, at every CPU level, in odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import DENSE, QUANTIZED, meaning, packed, random_blocks, rounded
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.library import Library, library
from tokenmill.ops.native.matrix import PackedMatrix


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("rows", [1, 15, 16, 50])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_products_equal_their_definition(name: str, rows: int, level: int) -> None:
    random = np.random.default_rng(rows)
    raw = random_blocks(QUANTIZED[name], rows, 768, random)
    x = torch.randn(21, 768, generator=torch.Generator().manual_seed(0))
    found = packed(raw, QUANTIZED[name]).matmul(x)
    assert relative_error(found, rounded(x) @ meaning(raw, QUANTIZED[name]).double().T) < 1e-5


@pytest.mark.parametrize("columns", [32, 96, 160])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_an_odd_number_of_groups(name: str, columns: int, level: int) -> None:
    raw = random_blocks(QUANTIZED[name], 17, columns, np.random.default_rng(1))
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    expected = rounded(x) @ meaning(raw, QUANTIZED[name]).double().T
    assert relative_error(packed(raw, QUANTIZED[name]).matmul(x), expected) < 1e-5


@pytest.mark.parametrize("large", [1, 19, 20, 24])
def test_as_many_groups_may_have_outliers_as_can_be(large: int, level: int) -> None:
    """Four fifths of a row's 24 groups may be large among them, with two outliers each; of equals none is."""
    raw = random_blocks(QUANTIZED["Q4_1"], 16, 768, np.random.default_rng(2))
    x = torch.rand(21, 24, 32, generator=torch.Generator().manual_seed(0)) / 1000
    x[:, 24 - large :] = 1 - x[:, 24 - large :]
    x[:, :, 5] = x[:, :, 5].round(decimals=2)  # the largest of the large: they are equal
    x = x.view(21, 768)
    assert ((x.view(21, 24, 32).amax(-1).square() > 1.25 * large / 24).sum(-1) == (large if large < 20 else 0)).all()
    found = packed(raw, QUANTIZED["Q4_1"]).matmul(x)
    assert relative_error(found, rounded(x) @ meaning(raw, QUANTIZED["Q4_1"]).double().T) < 1e-5


@pytest.mark.parametrize("name", QUANTIZED)
def test_outliers_cost_the_others_nothing(name: str, level: int) -> None:
    """Each column of a group in turn, so that every place of a code is taken out once."""
    raw = random_blocks(QUANTIZED[name], 19, 768, np.random.default_rng(4))
    x = torch.randn(32, 768, generator=torch.Generator().manual_seed(0))
    x[:, 96:128] += 1000 * torch.eye(32)
    found, weight = packed(raw, QUANTIZED[name]).matmul(x).double(), meaning(raw, QUANTIZED[name]).double()
    assert relative_error(found, rounded(x) @ weight.T) < 1e-5
    # With 8 bits for the whole group its other values would be off by up to 4.
    assert float((rounded(x) - x.double()).abs().max()) < 0.05


@pytest.mark.parametrize("shape", [(1, 1), (16, 7), (33, 100), (5, 257), (120, 64)])
@pytest.mark.parametrize("name", DENSE)
def test_dense_products_are_as_exact_as_floats(name: str, shape: tuple[int, int], level: int) -> None:
    """Few rows are multiplied with several panels at once, of which the last may not be full."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(DENSE[name])
    matrix = PackedMatrix(*shape)
    matrix.append_floats(weight)
    x, bias = torch.randn(31, shape[1], generator=generator), torch.randn(shape[0], generator=generator)
    expected = x.double() @ weight.double().T + bias
    for rows in (1, 2, 3, 4, 7, 15, 31):
        found = matrix.matmul(x[:rows], bias).double()
        torch.testing.assert_close(found, expected[:rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*QUANTIZED, *DENSE])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(name: str, level: int, native: Library) -> None:
    matrix = PackedMatrix(70, 256)
    if name in DENSE:
        matrix.append_floats(torch.randn(70, 256).to(DENSE[name]))
    else:
        raw = random_blocks(QUANTIZED[name], 70, 256, np.random.default_rng(2))
        matrix.append_blocks(raw.reshape(-1), OF_GGUF[QUANTIZED[name]], 70)
    x = torch.randn(150, 256)
    x[torch.rand(x.shape) < 0.02] *= 20  # outliers, some of them two in a group or beside another row's
    native.threads = 1
    whole = matrix.matmul(x)
    for threads in (1, 2, 3):
        native.threads = threads
        for size in (1, 2, 3, 5, 8, 16, 31, 150):
            assert torch.equal(matrix.matmul(x[:size]), whole[:size])
            assert torch.equal(matrix.matmul(x[150 - size :]), whole[150 - size :])


def test_segments_of_several_forms_bias_and_strided_inputs(level: int) -> None:
    random = np.random.default_rng(3)
    parts = [("Q4_K", 20), ("Q6_K", 16), ("Q8_0", 5)]
    matrix, meanings = PackedMatrix(44, 256), []
    for name, rows in parts:
        raw = random_blocks(QUANTIZED[name], rows, 256, random)
        matrix.append_blocks(raw.reshape(-1), OF_GGUF[QUANTIZED[name]], rows)
        meanings.append(meaning(raw, QUANTIZED[name]).double())
    dense = torch.randn(3, 256)
    matrix.append_floats(dense)
    bias, wide = torch.randn(44), torch.randn(9, 300)
    x = wide[:, 11 : 11 + 256]
    expected = torch.cat([rounded(x.contiguous()) @ torch.cat(meanings).T, x.double() @ dense.double().T], dim=1) + bias
    torch.testing.assert_close(matrix.matmul(x, bias).double(), expected, rtol=1e-5, atol=1e-4)


def test_rows_are_taken_in_the_order_given() -> None:
    random = np.random.default_rng(4)
    raw = random_blocks(QUANTIZED["Q4_1"], 24, 64, random)
    order = random.permutation(24).astype(np.int32)
    found = packed(raw, QUANTIZED["Q4_1"], order).take_rows(torch.arange(24))
    assert torch.equal(found, meaning(raw, QUANTIZED["Q4_1"])[torch.from_numpy(order).long()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*QUANTIZED, "F16"])
def test_inputs_that_are_not_finite_show_in_their_own_row_only(name: str, bad: float, level: int) -> None:
    matrix = PackedMatrix(16, 512)
    if name == "F16":
        matrix.append_floats(torch.ones(16, 512).half())
    else:
        raw = random_blocks(QUANTIZED[name], 16, 512, np.random.default_rng(5))
        matrix.append_blocks(raw.reshape(-1), OF_GGUF[QUANTIZED[name]], 16)
    for place in (0, 17, 511):
        x = torch.ones(5, 512)
        x[2, place] = bad
        found = matrix.matmul(x)
        assert not found[2].isfinite().any()
        assert found[[0, 1, 3, 4]].isfinite().all()


@given(scale=st.floats(1e-38, 1e37), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_inputs_of_any_size_are_rounded_relative_to_their_group(scale: float, seed: int) -> None:
    library()
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed)) * scale
    weight = np.zeros((64, 68), dtype=np.uint8)  # the identity in Q8_0: what comes out is the rounded input
    for row in range(64):
        block = weight[row, 34 * (row // 32) :]
        block[:2] = np.array([1.0], dtype=np.float16).view(np.uint8)
        block[2 + row % 32] = 1
    found = packed(weight, QUANTIZED["Q8_0"]).matmul(x)
    top = x.view(2, 32).abs().amax(-1, keepdim=True)
    assert ((found - x).view(2, 32).abs() <= torch.where(top > 1e-30, top / 254 * 1.001, top)).all()


def test_no_rows_give_no_rows() -> None:
    matrix = PackedMatrix(4, 32)
    matrix.append_floats(torch.ones(4, 32))
    assert matrix.matmul(torch.ones(0, 32)).shape == (0, 4)


def test_what_does_not_fit_is_refused() -> None:
    matrix, form = PackedMatrix(4, 64), OF_GGUF[8]
    with pytest.raises(ValueError, match="do not take"):
        matrix.append_blocks(np.zeros(100, dtype=np.uint8), form, 4)
    with pytest.raises(ValueError, match="do not fit"):
        matrix.append_blocks(np.zeros(5 * 68, dtype=np.uint8), form, 5)
    with pytest.raises(ValueError, match="order"):
        matrix.append_blocks(np.zeros(4 * 68, dtype=np.uint8), form, 4, np.array([0, 1, 2, 4], dtype=np.int32))
    with pytest.raises(ValueError, match="columns are needed"):
        matrix.matmul(torch.ones(1, 65))
