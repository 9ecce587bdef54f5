"""The kernels around a recorded decode step, against what the plain path does: places, drafts, what holds, lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.ops import reference_decode
from tokenmill.ops.types import DecodeTables

ROWS, WIDTH, BLOCKS, BLOCK_SIZE, DRAFTED = 6, 64, 16, 4, 4
SCRATCH, REJECTED = ROWS, -2


def tables_of(generator: torch.Generator, device: str) -> DecodeTables:
    def some(high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=dtype).to(device)

    return DecodeTables(
        tokens=some(9, ROWS + 1, WIDTH, dtype=torch.int32),
        block_tables=some(100, ROWS + 1, BLOCKS, dtype=torch.int32),
        lengths=some(20, ROWS + 1, dtype=torch.int64),
        drafts=some(9, ROWS + 1, DRAFTED, dtype=torch.int64),
        on_device=-1,
        scratch_row=SCRATCH,
        block_size=BLOCK_SIZE,
    )


def copied(tables: DecodeTables) -> DecodeTables:
    return replace(tables, tokens=tables.tokens.clone(), lengths=tables.lengths.clone())


@pytest.mark.parametrize("block", [4, 64])  # entries of a program: rows lie in several, or all in one
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    rows=st.lists(
        # number of drafts that are verified, drafts that were proposed, slack, whether the device drafted them
        st.tuples(st.integers(0, DRAFTED), st.integers(0, 7), st.booleans(), st.booleans()),
        min_size=1,
        max_size=ROWS,
    ),
    padding=st.integers(0, 3),
    right=st.floats(0, 1),
)
def test_steps_with_drafts_equal_the_plain_path(block, seed, rows, padding, right, triton_device, monkeypatch):
    from tokenmill.ops.triton import decode_step
    from tokenmill.ops.triton.decode_step import decode_inputs, keep_sampled

    monkeypatch.setattr(decode_step, "_BLOCK", block)
    generator = torch.Generator().manual_seed(seed)
    tables = tables_of(generator, triton_device)
    entries, proposed = [], []
    for row, (count, number, slack, on_device) in enumerate(rows):
        start = int(torch.randint(1, 30, (), generator=generator))
        tables.lengths[row] = start + 1 + int(torch.randint(0, 3, (), generator=generator))
        first = len(proposed)
        proposed += [-1] * count if on_device else torch.randint(0, 9, (number,), generator=generator).tolist()
        entries += [(row, start, n, first, len(proposed), int(slack and not on_device)) for n in range(count + 1)]
    entries += [(SCRATCH, 0, 0, 0, 0, 0)] * padding
    told = torch.tensor(entries).T.contiguous().to(triton_device)
    proposed = torch.tensor(proposed or [0]).to(triton_device)
    others = copied(tables)
    arguments = told[0], told[1], (told[2:], proposed)
    expected, made = reference_decode.decode_inputs(others, *arguments), decode_inputs(tables, *arguments)
    for name in ("ids", "positions", "slots", "context", "rows", "is_draft"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert torch.equal(tables.tokens[:SCRATCH], others.tokens[:SCRATCH])

    following = torch.roll(expected.ids, -1).long()  # what would make the next draft hold
    guessed = torch.rand(len(following), generator=generator).to(triton_device) < right
    anything = torch.randint(-1, 9, following.shape, generator=generator).to(triton_device)
    sampled = torch.where(guessed, following, anything)
    held = sampled.clone()
    last = reference_decode.keep_sampled(others, told[0], expected, held, told[2], REJECTED)
    assert torch.equal(keep_sampled(tables, told[0], made, sampled, told[2], REJECTED), last)
    assert torch.equal(sampled, held) and torch.equal(tables.lengths[:SCRATCH], others.lengths[:SCRATCH])
    assert torch.equal(tables.tokens[:SCRATCH], others.tokens[:SCRATCH])


def test_steps_without_drafts_read_and_write_one_token_per_row(triton_device):
    from tokenmill.ops.triton.decode_step import decode_inputs, keep_sampled

    tables = tables_of(torch.Generator().manual_seed(1), triton_device)
    before, lengths = tables.tokens.clone(), tables.lengths.clone()
    rows, starts = torch.tensor([[4, 1, SCRATCH], [9, 33, 0]]).to(triton_device)
    made = decode_inputs(tables, rows, starts)
    assert made.ids.tolist() == [before[4, 9], before[1, 33], before[SCRATCH, 0]]
    assert made.context.tolist() == [10, 34, 0] and made.positions.tolist() == [9, 33, 0]
    assert made.slots.tolist() == [tables.block_tables[4, 2] * 4 + 1, tables.block_tables[1, 8] * 4 + 1, -1]
    assert keep_sampled(tables, rows, made, torch.tensor([7, -1, 3]).to(triton_device)) is None
    before[4, 10], before[1, 34], before[SCRATCH, 1] = 7, 0, 3
    assert torch.equal(tables.tokens, before) and torch.equal(tables.lengths, lengths)
