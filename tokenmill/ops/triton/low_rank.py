"""What LoRA adapters add to a product: one launch narrows all tokens, one widens them, whatever adapters they have.

Slots are read on the device, so that nothing is sorted and nobody waits; tokens without an adapter end at once. Few
tokens are programs of their own. Many are tiles, of which those with the same adapter are multiplied together: a
prompt's tokens all are.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare
from tokenmill.ops.triton.launch import ceil_div, quick_launch

FEW = 128  # tokens, of steps that decode
_TILE = 16
_COLUMNS = 128  # of the output, of a program


def add_low_rank(
    out: torch.Tensor,  # [tokens, out], added to
    x: torch.Tensor,  # [tokens, in]
    adapter: torch.Tensor,  # [tokens] int64: slots, negative without
    down: torch.Tensor,  # [slots, sections * rank, in]
    up: torch.Tensor,  # [slots, rank, out], scaled
    ranks: torch.Tensor,  # [slots] int64
    ends: tuple[int, ...],  # of the sections of `out`
) -> torch.Tensor:  # out
    tokens, columns = x.shape
    if not tokens:
        return out
    rank, sections = up.shape[1], len(ends)
    tile = 1 if tokens <= FEW else _TILE
    tiles = ceil_div(tokens, tile)
    block = max(_TILE, triton.next_power_of_2(rank))
    narrow = torch.empty(tokens, sections * rank, dtype=torch.float32, device=x.device)
    _narrow_kernel[(tiles, sections)](
        x, adapter, down, ranks, narrow, tokens, columns, x.stride(0),
        RANK=rank, WIDE=sections * rank, BLOCK=block, COLUMNS=min(256, 8192 // block), TILE=tile, num_warps=4,
    )  # fmt: skip
    starts = (0, *ends[:-1])
    blocks = [ceil_div(last - first, _COLUMNS) for first, last in zip(starts, ends, strict=True)]
    second, third = blocks[0], sum(blocks[:2])
    first_end, second_end = ends[0], (*ends, ends[-1])[1]
    _widen_kernel[(tiles, sum(blocks))](
        narrow, adapter, up, ranks, out, tokens, out.stride(0), ends[-1], first_end, second_end, second, third,
        RANK=rank, WIDE=sections * rank, BLOCK=block, COLUMNS=_COLUMNS, TILE=tile, num_warps=4,
    )  # fmt: skip
    return out


@quick_launch
@triton.jit(do_not_specialize=["tokens"])
def _narrow_kernel(
    x,  # [tokens, columns]
    adapter,  # [tokens]
    down,  # [slots, WIDE, columns]
    ranks,  # [slots]
    narrow,  # [tokens, WIDE] float32
    tokens,
    columns,
    stride_token,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,  # at least RANK
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    first = tl.program_id(1) * RANK
    r = tl.arange(0, BLOCK)
    slots = tl.load(adapter + token, mask=token < tokens, other=-1)
    left = slots
    slot = tl.max(left, 0)
    while slot >= 0:  # each adapter of the tile once
        used = tl.load(ranks + slot)
        mine = slots == slot
        if used > 0:
            sums = tl.zeros((TILE, BLOCK), dtype=tl.float32)
            for start in range(0, columns, COLUMNS):
                k = start + tl.arange(0, COLUMNS)
                rows = tl.load(
                    x + token[:, None] * stride_token + k[None, :],
                    mask=mine[:, None] & (k < columns)[None, :],
                    other=0.0,
                )
                weight = tl.load(
                    down + (slot * WIDE + first + r)[:, None] * columns + k[None, :],
                    mask=(r < used)[:, None] & (k < columns)[None, :],
                    other=0.0,
                )
                if TILE == 1:
                    sums += tl.sum(weight.to(tl.float32) * rows.to(tl.float32), 1)[None, :]
                else:
                    sums += tl.dot(rows, tl.trans(weight), input_precision="ieee")
            tl.store(
                narrow + token[:, None] * WIDE + (first + r)[None, :], sums, mask=mine[:, None] & (r < used)[None, :]
            )
        left = tl.where(mine, -1, left)
        slot = tl.max(left, 0)


@quick_launch
@triton.jit(do_not_specialize=["tokens"])
def _widen_kernel(
    narrow,  # [tokens, WIDE] float32
    adapter,  # [tokens]
    up,  # [slots, RANK, rows]
    ranks,  # [slots]
    out,  # [tokens, rows]
    tokens,
    stride_token,
    rows,
    first_end,  # of the first section, among the rows
    second_end,
    second_block,  # the second section's first block
    third_block,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    block = tl.program_id(1)
    in_second, in_third = block >= second_block, block >= third_block
    section = in_second.to(tl.int32) + in_third.to(tl.int32)
    begin = tl.where(in_third, second_end, tl.where(in_second, first_end, 0))
    end = tl.where(in_third, rows, tl.where(in_second, second_end, first_end))
    at = block - tl.where(in_third, third_block, tl.where(in_second, second_block, 0))
    n = begin + at * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, BLOCK)
    slots = tl.load(adapter + token, mask=token < tokens, other=-1)
    left = slots
    slot = tl.max(left, 0)
    if slot >= 0:
        sums = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
        while slot >= 0:
            used = tl.load(ranks + slot)
            mine = slots == slot
            if used > 0:
                given = tl.load(
                    narrow + token[:, None] * WIDE + (section * RANK + r)[None, :],
                    mask=mine[:, None] & (r < used)[None, :],
                    other=0.0,
                )
                weight = tl.load(
                    up + (slot * RANK + r)[:, None] * rows + n[None, :],
                    mask=(r < used)[:, None] & (n < end)[None, :],
                    other=0.0,
                )
                if TILE == 1:
                    sums += tl.sum(tl.trans(given) * weight.to(tl.float32), 0)[None, :]
                else:
                    sums += tl.dot(given.to(weight.dtype), weight, input_precision="ieee")
            left = tl.where(mine, -1, left)
            slot = tl.max(left, 0)
        where = out + token[:, None] * stride_token + n[None, :]
        written = (slots >= 0)[:, None] & (n < end)[None, :]
        before = tl.load(where, mask=written, other=0.0).to(tl.float32)
        tl.store(where, (before + sums).to(out.dtype.element_ty), mask=written)


IMPLEMENTATIONS = (declare(add_low_rank, optional=True),)
