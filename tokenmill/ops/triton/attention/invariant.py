"""Attention in which a query's bits depend on its own keys alone: not on other rows, on chunks, nor on who reads what.

Keys are folded in tiles of BLOCK_N and the tiles of every SPAN keys, counted from the row's first key, make a partial
result; partial results are merged from the first to the last. A program may do several spans and merge them itself, or
leave each of them for the last program of the row to merge: the same operations on the same numbers either way, so the
work can be cut as speed wants. Queries that decode and queries of a chunk go through the same kernel, in tiles of a
different height, with what could differ between heights kept out of it:
  - Products are chains of m16n8k16 instructions in every tile (see `_tile`), 16 columns at a time.
  - The sum of weights is a product with ones: a plain reduction would follow the layout, and so the height.
  - No multiplication is contracted with an addition except where written (`tl.fma`).
  - A tile of keys that a query does not see leaves its sums as they are: it adds zeros and scales with one.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import multiprocessors
from tokenmill.ops.kv_forms import KVScales
from tokenmill.ops.triton.attention.kv_codes import cache_arguments, load_queries
from tokenmill.ops.triton.attention.paging import (
    cache_offsets,
    finite_or_zero,
    load_rows,
    merged,
    padded_block,
    score,
)
from tokenmill.ops.triton.attention.tile import paged_arguments, query_pairs
from tokenmill.ops.triton.config import (
    DECODE_WORKSPACE_BYTES,
    MAX_HEAD_DIM,
    Tile,
    declare,
    partial_bytes,
    power_of_two,
)
from tokenmill.ops.triton.launch import quick_launch
from tokenmill.ops.types import AttentionBatch, Mask

SPAN = 512  # keys of a partial result
_FIELDS = tl.constexpr(8)  # of an item: first token, count, context, table row, first pair, first span, end span, slot
_FEW_ROWS_SLOTS = 256
_WAVES = 8  # programs per multiprocessor that a decode aims at: enough to even out the tail


@dataclass(frozen=True)
class _Work:
    """What the programs of one launch do: items are tiles of (query, head) pairs of a row with some of its spans."""

    tile: Tile
    head_tiles: int  # tiles that each item stands for
    items: torch.Tensor  # [n, 8] int32; a negative first token: nothing to do
    slots: int  # partial results that there is room for
    counters: torch.Tensor  # [slots, kv_heads * head_tiles] int32: spans that are done; zero between layers


def attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]; may be a strided view of k_cache
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,  # of a quantized cache, which this kernel does not declare
) -> torch.Tensor:  # [tokens, heads, v_dim]
    if scales is not None:
        raise NotImplementedError("the invariant Triton attention reads floats only, no codes")
    if batch.tree is not None or batch.tails is not None:
        raise NotImplementedError("the Triton attention has no tree mask; choose the reference attention for trees")
    assert q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == 1
    heads, key_dim = q.shape[1], q.shape[2]
    kv_heads, value_dim = k_cache.shape[2], v_cache.shape[3]
    name = f"invariant: {heads} {key_dim} {kv_heads} {value_dim} {mask.window}"  # equal in many layers
    if name not in batch.cache:
        batch.cache[name] = [
            *([_decodes(q, kv_heads, value_dim, batch, mask)] if batch.num_singles else []),
            *([_chunks(q, kv_heads, value_dim, batch, mask)] if batch.num_singles < len(batch.host_counts) else []),
        ]
    out = torch.empty(q.shape[0], heads, value_dim, dtype=q.dtype, device=q.device)
    cache = cache_arguments(k_cache, v_cache, None)
    for work in batch.cache[name]:
        partial = torch.empty(work.slots, heads, value_dim + 2, dtype=torch.float32, device=q.device)
        arguments, constants = paged_arguments(q, cache, batch, mask, scale, work.tile)
        _attention_kernel[(kv_heads * work.head_tiles, work.items.shape[0])](
            *arguments[:3], *arguments[5:], out, *out.stride()[:2], partial, work.items, work.counters, heads,
            mask.window or 0, **constants, WINDOWED=mask.window is not None, HEAD_TILES=work.head_tiles,
            SPLITS=work.slots > 0, SPAN=SPAN, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _tile(decodes: bool, group: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """The height and the warps may differ between decodes and chunks, the width may not. Fewer than 64 pairs, so that
    products never become the wider instructions of a warpgroup.
    """
    widest = max(key_dim, value_dim)
    if dtype == torch.float32:
        return Tile(16, 32 if widest <= 128 else 16, 4 if widest <= 256 else 8, 2)
    height = min(32, max(16, power_of_two(group))) if decodes else 32
    if widest > 128:
        return Tile(height, 32, 8, 3 if widest <= 256 else 2)
    return Tile(height, 64, 4, 5 if decodes else 3)


def _decodes(q: torch.Tensor, kv_heads: int, value_dim: int, batch: AttentionBatch, mask: Mask) -> _Work:
    """The device deals spans to programs by what rows really have to read, so that a recorded step stays balanced."""
    rows, heads, device = batch.num_singles, q.shape[1], q.device
    tile = _tile(True, heads // kv_heads, q.shape[2], value_dim, q.dtype)
    head_tiles = triton.cdiv(heads // kv_heads, tile.block_m)
    programs = kv_heads * head_tiles
    share = max(1, _WAVES * multiprocessors(device) // programs)
    # Room for all spans of a few rows, or for some of many. A program that finds nothing to do costs a little, too.
    slots = min(rows * triton.cdiv(batch.max_context, SPAN), max(share, _FEW_ROWS_SLOTS - 4 * rows))
    slots = max(1, min(slots, DECODE_WORKSPACE_BYTES // partial_bytes(heads, value_dim)))
    work = _Work(
        tile=tile,
        head_tiles=head_tiles,
        items=torch.empty(rows + slots, _FIELDS.value, dtype=torch.int32, device=device),
        slots=slots,
        counters=torch.empty(slots, programs, dtype=torch.int32, device=device),
    )
    _deal_kernel[(1,)](
        work.items, work.counters, batch.rows, batch.context, rows, rows + slots, work.counters.numel(), share, slots,
        mask.window or 0,
        WINDOWED=mask.window is not None, SPAN=SPAN, ROWS=max(256, power_of_two(rows)), num_warps=4,
    )  # fmt: skip
    return work


def _chunks(q: torch.Tensor, kv_heads: int, value_dim: int, batch: AttentionBatch, mask: Mask) -> _Work:
    """Tiles of the rows with several queries, those with most keys first, so that the last ones to end are short."""
    group = q.shape[1] // kv_heads
    tile = _tile(False, group, q.shape[2], value_dim, q.dtype)
    host = torch.from_numpy(_chunk_items(batch, group, tile.block_m, mask))
    items = host.pin_memory().to(q.device, non_blocking=True) if q.device.type == "cuda" else host
    return _Work(tile, 1, items, 0, items)


def _chunk_items(batch: AttentionBatch, group: int, block_m: int, mask: Mask) -> np.ndarray:
    singles = batch.num_singles
    count = np.asarray(batch.host_counts[singles:], dtype=np.int64)
    context = np.asarray(batch.host_context[singles:], dtype=np.int64)
    first_token = singles + np.cumsum(count) - count
    tiles = -(-count * group // block_m)
    owner = np.repeat(np.arange(len(tiles)), tiles)
    first_pair = (np.arange(len(owner)) - np.repeat(tiles.cumsum() - tiles, tiles)) * block_m
    before = (context - count)[owner]
    keys = before + np.minimum((first_pair + block_m - 1) // group, count[owner] - 1) + 1
    first_span = np.zeros_like(keys)
    if mask.window is not None:
        first_span = np.maximum(before + first_pair // group - mask.window + 1, 0) // SPAN
    table_row = np.asarray(batch.host_rows[singles:], dtype=np.int64)[owner]
    slot = np.zeros_like(keys)  # not used
    columns = [first_token[owner], count[owner], context[owner], table_row, first_pair, first_span, -(-keys // SPAN)]
    order = np.argsort(first_span * SPAN - keys, kind="stable")
    return np.stack([*columns, slot], axis=1)[order].astype(np.int32)


@quick_launch
@triton.jit(
    do_not_specialize=["rows", "num_items", "num_counters", "share", "slots", "window"],
    do_not_specialize_on_alignment=["table_rows", "contexts"],
)
def _deal_kernel(
    items,  # [num_items, 8]
    counters,  # [num_counters]
    table_rows,  # [rows]
    contexts,  # [rows]
    rows,
    num_items,
    num_counters,
    share,  # of all spans that a row may have and stay whole, inverse
    slots,
    window,
    WINDOWED: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Cut rows that have more than their share of all keys into their spans, as long as there is room for them."""
    row = tl.arange(0, ROWS)
    live = row < rows
    context = tl.load(contexts + row, mask=live, other=0)
    table_row = tl.load(table_rows + row, mask=live, other=0)
    first = _first_span(context, window, WINDOWED, SPAN)
    spans = tl.cdiv(context, SPAN) - first
    most = tl.maximum(tl.cdiv(tl.sum(spans, 0), share), 1)
    cut = tl.where(spans > most, spans, 0)
    end_slot = tl.cumsum(cut, 0)
    split = (cut > 0) & (end_slot <= slots)
    # A padding row has no keys, but its zeros must be written, too.
    parts = tl.where(live, tl.where(split, spans, 1), 0)
    end = tl.cumsum(parts, 0)
    for part in range(0, tl.max(parts, 0)):
        mine = part < parts
        item = items + (end - parts + part) * _FIELDS
        tl.store(item, row, mask=mine)
        tl.store(item + 1, tl.full([ROWS], 1, tl.int32), mask=mine)
        tl.store(item + 2, context, mask=mine)
        tl.store(item + 3, table_row, mask=mine)
        tl.store(item + 4, tl.zeros([ROWS], tl.int32), mask=mine)
        tl.store(item + 5, first + part, mask=mine)
        tl.store(item + 6, tl.where(split, first + part + 1, first + spans), mask=mine)
        tl.store(item + 7, end_slot - cut, mask=mine)
    used = tl.sum(parts, 0)
    for at in range(0, num_items, ROWS):
        tl.store(items + (at + row) * _FIELDS, -1, mask=(at + row >= used) & (at + row < num_items))
    for at in range(0, num_counters, ROWS):
        tl.store(counters + at + row, 0, mask=at + row < num_counters)


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["items", "tables"],
)
def _attention_kernel(
    # Of paged_arguments, but no scales:
    q, k_cache, v_cache, tables, stride_q_token, stride_q_head, stride_k_block, stride_k_token,
    stride_k_head, stride_v_block, stride_v_token, stride_v_head, stride_table, cap_scale, score_scale,
    out,  # [tokens, heads, VALUE_DIM]
    stride_out_token, stride_out_head,
    partial,  # [slots, heads, VALUE_DIM + 2] float32: sum, its largest score, its total
    items,  # [items, 8]
    counters,  # [slots, kv_heads * HEAD_TILES]
    heads, window,
    GROUP: tl.constexpr, SAME_LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SPLITS: tl.constexpr,  # whether an item may have a part of its row's spans
    SPAN: tl.constexpr,
):  # fmt: skip
    VALUE_BLOCK: tl.constexpr = padded_block(VALUE_DIM)
    kv_head = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    item = items + tl.program_id(1) * _FIELDS
    first_token = tl.load(item)
    count = tl.load(item + 1)
    context = tl.load(item + 2)
    table = tables + tl.load(item + 3).to(tl.int64) * stride_table
    first_pair = tl.load(item + 4) + (tl.program_id(0) % HEAD_TILES) * BLOCK_M
    first_span = tl.load(item + 5)
    end_span = tl.load(item + 6)
    slot = tl.load(item + 7)
    if first_token < 0:
        return
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head

    before = context - count
    token, live, position, head, q_offsets = query_pairs(
        first_pair, count, before, first_token, kv_head, stride_q_token, stride_q_head, GROUP, BLOCK_M
    )
    queries, _ = load_queries(q, q_offsets, live, KEY_DIM, FORM)
    q_first, q_rest = queries
    # Keys that some query of the tile sees lie in [earliest - window, end).
    earliest = before + first_pair // GROUP
    end = before + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, count - 1) + 1
    end = tl.minimum(end, end_span * SPAN)
    dim = tl.arange(0, VALUE_BLOCK)
    # Wider than tall, so that warps share the columns of products and not their rows, of which there are few.
    ONES: tl.constexpr = 2 * BLOCK_M
    ones = tl.full([BLOCK_N, ONES], 1.0, q_first.dtype)
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]

    acc, top, total = _nothing(BLOCK_M, VALUE_BLOCK)
    for span in tl.range(first_span, end_span, num_stages=1):
        span_acc, span_top, _ = _nothing(BLOCK_M, VALUE_BLOCK)
        sums = tl.zeros([BLOCK_M, ONES], tl.float32)  # each column is the sum of the weights
        for start in range(span * SPAN, tl.minimum(end, (span + 1) * SPAN), BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            seen = key < end
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (key > earliest - window)
                visible = visible & (key[None, :] > position[:, None] - window)
            k_offsets, v_offsets = cache_offsets(
                table, key, seen, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
                SAME_LAYOUT, BLOCK_SIZE,
            )  # fmt: skip
            scores = score(q_first, q_rest, k_head, k_offsets, seen, cap_scale, KEY_DIM, SOFTCAP)
            scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(span_top, tl.max(scores, 1) * score_scale)
            base = finite_or_zero(new_top)
            scales = tl.full([BLOCK_M, BLOCK_N], score_scale, tl.float32)
            weights = tl.exp2(tl.fma(scores, scales, tl.broadcast_to(-base[:, None], scores.shape))).to(q_first.dtype)
            shrink = tl.exp2(span_top - base)
            values = load_rows(v_head, v_offsets, seen, VALUE_DIM, VALUE_BLOCK).to(q_first.dtype)
            span_acc = tl.dot(weights, values, span_acc * shrink[:, None], input_precision="ieee")
            sums = tl.dot(weights, ones, sums * shrink[:, None], input_precision="ieee")
            span_top = new_top
        acc, top, total = merged(acc, top, total, span_acc, span_top, tl.max(sums, 1))

    done = True
    if SPLITS:
        row_span = _first_span(context, window, WINDOWED, SPAN)
        spans = tl.cdiv(context, SPAN) - row_span
        if end_span - first_span < spans:  # a span of several: merged into nothing, it is what it was
            parts = partial + (slot * heads + head) * (VALUE_DIM + 2)
            place = parts + (first_span - row_span) * heads * (VALUE_DIM + 2)
            tl.store(place[:, None] + dim[None, :], acc, mask=inside)
            tl.store(place + VALUE_DIM, top, mask=live)
            tl.store(place + VALUE_DIM + 1, total, mask=live)
            tl.debug_barrier()  # all threads have written their share before one of them says so
            counter = counters + slot * tl.num_programs(0) + tl.program_id(0)
            done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == spans - 1
            if done:
                tl.store(counter, 0)  # for the next layer
                acc, top, total = _nothing(BLOCK_M, VALUE_BLOCK)
                for span in tl.range(0, spans, num_stages=1):
                    place = parts + span * heads * (VALUE_DIM + 2)
                    # Other programs wrote these: not from this multiprocessor's own cache.
                    part = tl.load(place[:, None] + dim[None, :], mask=inside, other=0.0, cache_modifier=".cg")
                    part_top = tl.load(place + VALUE_DIM, mask=live, other=float("-inf"), cache_modifier=".cg")
                    part_total = tl.load(place + VALUE_DIM + 1, mask=live, other=0.0, cache_modifier=".cg")
                    acc, top, total = merged(acc, top, total, part, part_top, part_total)
    if done:
        # A padding row has no keys at all: it gets zeros.
        divisor = tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], acc.shape)
        place = (first_token + token).to(tl.int64) * stride_out_token + head * stride_out_head
        tl.store(out + place[:, None] + dim[None, :], tl.div_rn(acc, divisor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _first_span(context, window, WINDOWED: tl.constexpr, SPAN: tl.constexpr):
    """The first span with a key that the last query of a row sees."""
    if WINDOWED:
        return tl.maximum(context - window, 0) // SPAN
    else:
        return context * 0


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, VALUE_BLOCK: tl.constexpr):
    """The partial result of no keys."""
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    return acc, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)


IMPLEMENTATIONS = (declare(attention, head_dims=(1, MAX_HEAD_DIM), name="invariant", rank=20),)
