"""Attention for rows with one query: keys are cut into parts that run side by side, and a second kernel joins them."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import MAX_SPLITS, decode_splits, decode_tile, power_of_two, split_head
from tokenmill.ops.triton.paging import cache_offsets, fold, load_rows, score, score_scales
from tokenmill.ops.types import AttentionBatch, Mask


def decode_attention(
    q: torch.Tensor,  # [tokens, heads, dim]; the first num_singles tokens are used
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]
    out: torch.Tensor,  # [tokens, heads, v_dim]
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
) -> None:
    rows, heads, key_dim = batch.num_singles, q.shape[1], q.shape[2]
    block_size, kv_heads, value_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    group = heads // kv_heads
    tile = decode_tile(group, key_dim, value_dim, q.dtype)
    head_tiles = triton.cdiv(group, tile.block_m)
    longest, total = _keys_to_read(batch, mask)
    splits, least_tiles = decode_splits(rows, kv_heads * head_tiles, heads, value_dim, longest, total, tile, q.device)
    partial, stats = _workspace(out, rows, heads, splits, value_dim)
    head = split_head(key_dim)
    cap_scale, score_scale = score_scales(scale, mask.softcap)
    window, sinks = mask.window or 0, mask.sinks
    _decode_kernel[(kv_heads * head_tiles, splits, rows)](
        q, k_cache, v_cache, out, partial, stats, batch.rows, batch.context, batch.block_tables,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), out.stride(0), out.stride(1),
        batch.block_tables.stride(0), heads, splits, least_tiles, window, sinks, cap_scale, score_scale,
        GROUP=group, HEAD_TILES=head_tiles, SAME_LAYOUT=k_cache.stride() == v_cache.stride(), BLOCK_SIZE=block_size,
        KEY_DIM=key_dim, FIRST=head.first, REST=head.rest, VALUE_DIM=value_dim,
        VALUE_BLOCK=max(16, power_of_two(value_dim)), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        WINDOWED=mask.window is not None, SOFTCAP=mask.softcap is not None, SPLIT=splits > 1,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(heads, rows)](
            partial, stats, out, batch.context, out.stride(0), out.stride(1),
            heads, splits, least_tiles, window, sinks,
            VALUE_DIM=value_dim, VALUE_BLOCK=power_of_two(value_dim), SPLITS=MAX_SPLITS,
            BLOCK_N=tile.block_n, WINDOWED=mask.window is not None, num_warps=4,
        )  # fmt: skip


def _keys_to_read(batch: AttentionBatch, mask: Mask) -> tuple[int, int]:
    """The most keys that one single reads, and the sum over the singles; counted once for all layers."""
    limit = batch.max_context if mask.window is None else min(batch.max_context, mask.window + mask.sinks)
    name = f"decode keys, at most {limit} per row"
    if name not in batch.cache:
        contexts = [min(context, limit) for context in batch.host_context[: batch.num_singles]]
        # A graph is captured with the bound of what its rows may grow to; beside chunks, the rows are what they are.
        longest = limit if batch.num_singles == len(batch.host_context) else max(contexts)
        batch.cache[name] = longest, sum(contexts)
    keys: tuple[int, int] = batch.cache[name]
    return keys


def _workspace(
    out: torch.Tensor, rows: int, heads: int, splits: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums [rows, heads, splits, v_dim] and their (top, total) [rows, heads, splits, 2]; float32."""
    if splits == 1:
        return out, out  # not touched
    space = torch.empty(rows * heads * splits * (value_dim + 2), dtype=torch.float32, device=out.device)
    return space.split(rows * heads * splits * value_dim)[0], space[rows * heads * splits * value_dim :]


@triton.jit
def _part_of_row(split, splits, least_tiles, context, window, sinks, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles [begin, end) of this split, and how the row's tiles are numbered: sinks first, then from `first` on."""
    first = 0
    sink_tiles = 0
    tiles = tl.cdiv(context, BLOCK_N)
    if WINDOWED:
        first = tl.maximum(context - window, 0) // BLOCK_N
        sink_tiles = tl.minimum(tl.cdiv(sinks, BLOCK_N), first)
        tiles = tiles - first + sink_tiles
    each = tl.maximum(tl.cdiv(tiles, splits), least_tiles)
    return split * each, tl.minimum((split + 1) * each, tiles), first, sink_tiles


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@triton.jit(
    do_not_specialize=["splits", "least_tiles", "window", "sinks"],
    do_not_specialize_on_alignment=["rows", "contexts", "tables"],
)
def _decode_kernel(
    q,  # [tokens, heads, KEY_DIM]
    k_cache,  # [blocks, BLOCK_SIZE, kv_heads, KEY_DIM]
    v_cache,  # [blocks, BLOCK_SIZE, kv_heads, VALUE_DIM]
    out,  # [tokens, heads, VALUE_DIM]
    partial,  # [rows, heads, splits, VALUE_DIM] float32
    stats,  # [rows, heads, splits, 2] float32
    rows,  # [rows]
    contexts,  # [rows]
    tables,  # [max_rows, max_blocks]
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    heads,
    splits,
    least_tiles,
    window,
    sinks,
    cap_scale,
    score_scale,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    kv_head = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts + row)
    begin, end, first, sink_tiles = _part_of_row(split, splits, least_tiles, context, window, sinks, WINDOWED, BLOCK_N)
    if SPLIT and begin >= end:
        return
    in_group = (tl.program_id(0) % HEAD_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = in_group < GROUP
    head = kv_head * GROUP + in_group
    table = tables + tl.load(rows + row).to(tl.int64) * stride_table
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head

    q_offsets = row * stride_q_token + head * stride_q_head
    q_first = load_rows(q, q_offsets, live, KEY_DIM if KEY_DIM < FIRST else FIRST, FIRST)
    q_rest = q_first
    if REST > 0:
        q_rest = load_rows(q + FIRST, q_offsets, live, KEY_DIM - FIRST, REST)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(begin, end):
        start = tile * BLOCK_N
        if WINDOWED:
            start = tl.where(tile < sink_tiles, tile, tile - sink_tiles + first) * BLOCK_N
        position = start + tl.arange(0, BLOCK_N)
        seen = position < context
        if WINDOWED:
            seen = seen & ((position >= context - window) | (position < sinks))
        k_offsets, v_offsets = cache_offsets(
            table, position, seen, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
            SAME_LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        scores = score(q_first, q_rest, k_head, k_offsets, seen, cap_scale, KEY_DIM, FIRST, REST, SOFTCAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        values = load_rows(v_head, v_offsets, seen, VALUE_DIM, VALUE_BLOCK).to(q_first.dtype)
        acc, top, total = fold(acc, top, total, scores, values, score_scale)

    dim = tl.arange(0, VALUE_BLOCK)
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    if SPLIT:
        place = (row * heads + head) * splits + split
        tl.store(partial + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=inside)
        tl.store(stats + place * 2, top, mask=live)
        tl.store(stats + place * 2 + 1, total, mask=live)
    else:
        # A padding row has no keys at all: it gets zeros.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = row * stride_out_token + head * stride_out_head
        tl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "least_tiles", "window", "sinks"], do_not_specialize_on_alignment=["contexts"])
def _join_kernel(
    partial,  # [rows, heads, splits, VALUE_DIM] float32
    stats,  # [rows, heads, splits, 2] float32
    out,  # [tokens, heads, VALUE_DIM]
    contexts,  # [rows]
    stride_out_token,
    stride_out_head,
    heads,
    splits,
    least_tiles,
    window,
    sinks,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    CHUNK: tl.constexpr = 8
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS)
    context = tl.load(contexts + row)
    begin, end, _, _ = _part_of_row(split, splits, least_tiles, context, window, sinks, WINDOWED, BLOCK_N)
    written = (split < splits) & (begin < end)
    place = (row * heads + head) * splits
    tops = tl.load(stats + (place + split) * 2, mask=written, other=float("-inf"))
    totals = tl.load(stats + (place + split) * 2 + 1, mask=written, other=0.0)
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp2(tops - top), 0)

    dim = tl.arange(0, VALUE_BLOCK)
    acc = tl.zeros([VALUE_BLOCK], tl.float32)
    parts = tl.sum(written.to(tl.int32), 0)
    for start in range(0, parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(stats + (place + part) * 2, mask=part < parts, other=float("-inf")) - top)
        values = load_rows(partial, (place + part) * VALUE_DIM, part < parts, VALUE_DIM, VALUE_BLOCK)
        acc += tl.sum(values * weight[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    target = out + row * stride_out_token + head * stride_out_head + dim
    tl.store(target, acc.to(out.dtype.element_ty), mask=dim < VALUE_DIM)
