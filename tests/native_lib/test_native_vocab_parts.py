"""Native ops over parts of a vocabulary: the likeliest token of all, and rows of an embedding that begins later."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.ops.native.matrix import PackedMatrix
from tokenmill.ops.native.ops import best_into, choose_into, pick_into

ROWS = 5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 7, 64, 9000]),
    st.integers(0, 2**20),
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 2**20), st.sampled_from([50.0, "nan", "inf", "-inf"]))),
)
def test_the_likeliest_of_all_parts_is_the_likeliest_of_the_whole(ranks, size, seed, special):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, ranks * size + seed % 3, generator=random)
    for row, at, value in special:  # several of 50 are equals, of which the first counts
        logits[row, at % logits.shape[1]] = float(value)
    rows, starts, on = torch.arange(ROWS), torch.arange(ROWS) + 2, torch.ones(1, dtype=torch.int64)
    tables = [torch.full((ROWS, 9), -5, dtype=torch.int32) for _ in range(2)]
    wanted, found = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    choose_into(wanted, logits, on, rows, starts, tables[0])
    parts, first = [], 0
    for part in logits.tensor_split(ranks, dim=1):
        parts.append(torch.zeros(ROWS, 2, dtype=torch.int64))
        best_into(parts[-1], part, on, first)
        first += part.shape[1]
    pick_into(found, torch.stack(parts), on, rows, starts, tables[1])
    assert torch.equal(found, wanted) and torch.equal(*tables)
    top = logits.max(-1)
    assert torch.equal(found, torch.where(top.values.isfinite(), top.indices, -1))
    pick_into(found.fill_(-7), torch.stack(parts), on.zero_(), rows, starts, tables[1])
    assert bool((found == -7).all()), "it was switched off"


def test_tokens_of_other_ranks_have_no_embedding_here():
    weight = torch.randn(20, 32)
    matrix = PackedMatrix(20, 32)
    matrix.append_floats(weight)
    found = matrix.take_rows(torch.tensor([99, 100, 119, 120, 0, -1]), first=100)
    assert torch.equal(found[1], weight[0]) and torch.equal(found[2], weight[19])
    assert not found[[0, 3, 4, 5]].any()
