"""The shares of programs that multiply gate and up for a few rows: everything is somebody's, and fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from tokenmill.ops.triton.gemm import gated_few
from tokenmill.ops.triton.gemm.gated_few import BLOCK_K, MOST_ROWS, MOST_TILES, OCTETS, choose_few_shape

PROGRAMS, SHARED_BYTES = 132, 232448  # of an H200


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(gated_few, "multiprocessors", lambda device: PROGRAMS)
    choose_few_shape.cache_clear()
    yield
    choose_few_shape.cache_clear()


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
