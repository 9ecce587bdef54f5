"""What stands around the forward pass of a step in which every row decodes: one kernel before it and one behind it.

Both are a few dozen bytes of work per row; as separate ops of torch they took a tenth of a small model's step.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.types import DecodeInputs, DecodeTables

_BLOCK = 64


def decode_inputs(
    tables: DecodeTables,
    rows: torch.Tensor,  # [n] int64
    starts: torch.Tensor,  # [n] int64
    drafts: tuple[torch.Tensor, torch.Tensor] | None = None,  # as in reference_decode.py: [4, n], [proposed]
) -> DecodeInputs:
    n, device = len(rows), rows.device
    ids, context, rows32 = torch.empty(3, n, dtype=torch.int32, device=device).unbind()
    slots, positions = torch.empty(2, n, dtype=torch.int64, device=device).unbind()
    is_draft = torch.empty(n, dtype=torch.int8, device=device)
    told, proposed = (rows, rows) if drafts is None else drafts
    _inputs_kernel[(ceil_div(n, _BLOCK),)](
        tables.tokens, tables.block_tables, tables.lengths, tables.drafts, rows, starts, told, proposed,
        ids, context, rows32, slots, positions, is_draft,
        n, len(proposed), tables.tokens.stride(0), tables.block_tables.stride(0), tables.scratch_row,
        tables.block_size,
        DRAFTS=drafts is not None, DRAFTED=tables.drafts.shape[1], ON_DEVICE=tables.on_device, BLOCK=_BLOCK,
        num_warps=2,
    )  # fmt: skip
    return DecodeInputs(ids, positions, slots, context, rows32, is_draft)


@quick_launch
@triton.jit(
    do_not_specialize=["n", "num_proposed"],
    do_not_specialize_on_alignment=[
        "rows", "starts", "told", "proposed", "ids", "context", "rows32", "slots", "positions", "is_draft",
    ],
)  # fmt: skip
def _inputs_kernel(
    tokens,  # [table rows, width] int32
    block_tables,  # [table rows, blocks] int32
    lengths,  # [table rows] int64
    device_drafts,  # [table rows, DRAFTED] int64
    rows,  # [n]
    starts,  # [n]
    told,  # [4, n]: number within the row, first and end of its drafts among the proposed, whether it has slack
    proposed,  # [num_proposed]
    ids,  # [n], and the other results
    context,
    rows32,
    slots,
    positions,
    is_draft,
    n,
    num_proposed,
    token_stride,
    table_stride,
    scratch_row,
    block_size,
    DRAFTS: tl.constexpr,
    DRAFTED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < n
    row = tl.load(rows + entry, mask=inside, other=0)
    position = tl.load(starts + entry, mask=inside, other=0)
    if DRAFTS:
        number = tl.load(told + entry, mask=inside, other=0)
        at = tl.load(told + n + entry, mask=inside, other=0) + number - 1
        end = tl.load(told + 2 * n + entry, mask=inside, other=0)
        slack = tl.load(told + 3 * n + entry, mask=inside, other=0)
        # Where the host does not know, the device does: drafts of the step before may have held.
        ahead = tl.where(slack > 0, tl.load(lengths + row, mask=inside, other=0) - 1 - position, 0)
        position += ahead + number
        at += ahead
        follows = number > 0
        drafted = follows & (at < end)
        at = tl.minimum(tl.maximum(at, 0), num_proposed - 1)
        draft = tl.load(proposed + at, mask=inside & follows, other=0)
        mine = tl.minimum(tl.maximum(number - 1, 0), DRAFTED - 1)
        kept = tl.load(device_drafts + row * DRAFTED + mine, mask=inside & follows, other=0)
        draft = tl.where(draft <= ON_DEVICE, kept, draft)
        known = tl.load(tokens + row * token_stride + position, mask=inside & (number == 0), other=0)
        token = tl.where(follows, tl.where(drafted, draft, 0).to(tl.int32), known)
        tl.store(tokens + row * token_stride + position, token, mask=inside & follows)
        tl.store(is_draft + entry, drafted.to(tl.int8), mask=inside)
    else:
        token = tl.load(tokens + row * token_stride + position, mask=inside, other=0)
    live = row != scratch_row
    block = tl.load(block_tables + row * table_stride + position // block_size, mask=inside, other=0).to(tl.int64)
    tl.store(ids + entry, token, mask=inside)
    tl.store(context + entry, tl.where(live, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(rows32 + entry, row.to(tl.int32), mask=inside)
    tl.store(slots + entry, tl.where(live, block * block_size + position % block_size, -1), mask=inside)
    tl.store(positions + entry, position, mask=inside)


def keep_sampled(
    tables: DecodeTables,
    rows: torch.Tensor,  # [n] int64
    inputs: DecodeInputs,
    sampled: torch.Tensor,  # [n] int64; where there are drafts, those that do not count become `rejected`
    numbers: torch.Tensor | None = None,  # [n] int64: of each entry within its row; None: there are no drafts
    rejected: int = 0,
) -> torch.Tensor | None:  # [n] int64: the row where its last entry that counts stands, elsewhere the scratch row
    n = len(rows)
    last = None if numbers is None else torch.empty_like(rows)
    said = sampled if numbers is None else sampled.clone()  # neighbours read what this one overwrites
    _keep_kernel[(ceil_div(n, _BLOCK),)](
        tables.tokens, tables.lengths, rows, inputs.positions, said, inputs.ids, inputs.is_draft,
        rows if numbers is None else numbers, sampled, rows if last is None else last,
        n, tables.tokens.stride(0), tables.scratch_row, rejected,
        DRAFTS=numbers is not None, BLOCK=_BLOCK, num_warps=2,
    )  # fmt: skip
    return last


@quick_launch
@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=[
        "rows", "positions", "sampled", "ids", "is_draft", "numbers", "out", "last",
    ],
)  # fmt: skip
def _keep_kernel(
    tokens,  # [table rows, width] int32
    lengths,  # [table rows] int64
    rows,  # [n]
    positions,  # [n]
    sampled,  # [n]
    ids,  # [n]
    is_draft,  # [n]
    numbers,  # [n]
    out,  # [n]
    last,  # [n]
    n,
    token_stride,
    scratch_row,
    rejected,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < n
    row = tl.load(rows + entry, mask=inside, other=0)
    position = tl.load(positions + entry, mask=inside, other=0)
    token = tl.load(sampled + entry, mask=inside, other=0)
    tl.store(tokens + row * token_stride + position + 1, tl.maximum(token, 0).to(tl.int32), mask=inside)
    if DRAFTS:
        # A draft holds if it and all before it are what was sampled.
        number = tl.load(numbers + entry, mask=inside, other=0)
        holds = inside
        for back in range(0, tl.max(number, 0)):
            holds = holds & ((back >= number) | _is_right(entry - back, sampled, ids, is_draft, inside))
        following = tl.load(numbers + entry + 1, mask=entry + 1 < n, other=0) > 0
        goes_on = following & _is_right(entry + 1, sampled, ids, is_draft, entry + 1 < n)
        ends = holds & ((goes_on == 0) | (entry + 1 >= n))
        tl.store(lengths + row, position + 2, mask=inside & ends)
        tl.store(last + entry, tl.where(ends, row, scratch_row), mask=inside)
        tl.store(out + entry, tl.where(holds, token, rejected), mask=inside)


@triton.jit
def _is_right(entry, sampled, ids, is_draft, inside):
    """Whether an entry is a draft, and the one that was sampled before it."""
    inside = inside & (entry > 0)
    was_drafted = tl.load(is_draft + entry, mask=inside, other=0) != 0
    before = tl.load(sampled + entry - 1, mask=inside, other=0)
    return was_drafted & (tl.load(ids + entry, mask=inside, other=0) == before)


IMPLEMENTATIONS = tuple(declare(fn) for fn in (decode_inputs, keep_sampled))
