"""Drafts of every proposer change no answer, however it is sampled and run: the cells of drafts_matrix.py."""

from __future__ import annotations

import pytest
from drafts_matrix import NO_TREES, ROWS, Matrix, drafts_nothing

from tokenmill.ops.native.library import Library, load

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    pytest.importorskip("llguidance")
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("row", ROWS)
def test_drafts_of_no_proposer_change_an_answer(matrix: Matrix, row: str) -> None:
    cells = dict(matrix.row(row))
    assert [column for column, cell in cells.items() if not cell.equal] == []
    # In every cell what it is named for has happened.
    assert [column for column, cell in cells.items() if (cell.drafts > 20) == drafts_nothing(row, column)] == []
    assert cells["preemption"].preempted and not cells["one row"].preempted
    assert [column for column, cell in cells.items() if (cell.hits > 0) == (column == "no prefix cache")] == []
    assert [column for column, cell in cells.items() if cell.other_hits and column != "preemption"] == []
    trees = [] if not ROWS[row][1] else [column for column in cells if column not in NO_TREES]
    assert [column for column, cell in cells.items() if cell.trees] == trees
