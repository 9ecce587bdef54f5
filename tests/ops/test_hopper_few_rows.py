"""The shares of programs that multiply a few rows on Hopper: everything is somebody's, and fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from tokenmill.ops.triton.gemm import gated_few, stream
from tokenmill.ops.triton.gemm.gated_few import BLOCK_K, MOST_ROWS, MOST_TILES, OCTETS, choose_few_shape
from tokenmill.ops.triton.gemm.stream import choose_splits, rows_of_a_tile

PROGRAMS, SHARED_BYTES = 132, 232448  # of an H200


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    for module in (gated_few, stream):
        monkeypatch.setattr(module, "multiprocessors", lambda device: PROGRAMS)
    for chosen in (choose_few_shape, choose_splits):
        chosen.cache_clear()
    yield
    for chosen in (choose_few_shape, choose_splits):
        chosen.cache_clear()


@given(rows=st.integers(1, MOST_ROWS), octets=st.integers(1, 8192))
def test_every_feature_is_computed_once_and_tiles_fit(rows, octets):
    shape = choose_few_shape(rows, 8 * octets, torch.device("cpu"))
    share = shape.octets * shape.passes
    assert share * shape.programs >= octets > share * (shape.programs - 1)
    assert shape.programs <= PROGRAMS
    tiles = -(-shape.octets // OCTETS)
    assert tiles <= MOST_TILES and rows <= shape.rows * shape.halves <= max(16, 2 * rows)
    stage = 2 * BLOCK_K * (64 * tiles + shape.rows * shape.halves)
    assert shape.stages >= 3 and shape.stages * stage + 1024 <= SHARED_BYTES


@pytest.mark.parametrize(("inner", "octets"), [(18944, 18), (14336, 14), (3072, 3), (8192, 8)])
def test_shares_of_known_models_are_even(inner, octets):
    shape = choose_few_shape(32, inner, torch.device("cpu"))
    assert (shape.octets, shape.passes) == (octets, 1) and shape.programs >= 128


@given(rows=st.integers(1, 256), columns=st.integers(1, 64 * PROGRAMS), inner=st.integers(1, 32768))
def test_parts_of_a_sum_run_at_once_and_none_is_empty(rows, columns, inner):
    splits, turns = choose_splits(rows, columns, inner, torch.device("cpu")), -(-inner // 64)
    row_tiles = -(-rows // rows_of_a_tile(rows, columns))
    assert splits == 1 or splits * row_tiles * -(-columns // 64) <= PROGRAMS
    assert splits == 1 or row_tiles <= 4  # which is how many counters a weight has for each of its tiles
    assert (splits - 1) * -(-turns // splits) < turns


@pytest.mark.parametrize(
    ("columns", "inner", "splits"),
    [(3584, 18944, 2), (6144, 4096, 1), (4096, 1024, 1), (1024, 2048, 4), (1024, 3072, 6)],
)
def test_parts_are_those_that_were_measured_to_be_best(columns, inner, splits):
    assert choose_splits(8, columns, inner, torch.device("cpu")) == splits
