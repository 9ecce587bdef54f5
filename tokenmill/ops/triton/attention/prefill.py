"""Attention for rows with several queries: tiles of (query, head of the group) pairs scan the paged cache once."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tokenmill.ops.kv_forms import KVScales
from tokenmill.ops.triton.attention.fresh import fresh_attention, fresh_plan, numbered
from tokenmill.ops.triton.attention.kv_codes import (
    as_kernels_take_it,
    fold_values,
    head_of,
    load_queries,
    no_values,
    of_head,
    score_keys,
    value_channels,
    whole_values,
)
from tokenmill.ops.triton.attention.paging import cache_offsets, score_scales
from tokenmill.ops.triton.config import Tile, prefill_tile
from tokenmill.ops.triton.launch import quick_launch
from tokenmill.ops.types import AttentionBatch, Mask


def prefill_attention(
    q: torch.Tensor,  # [tokens, heads, dim]; the tokens after the first num_singles are used
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]
    out: torch.Tensor,  # [tokens, heads, v_dim]
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,
) -> None:
    plan = fresh_plan(q, k_cache, v_cache, batch, mask)
    if plan is not None:
        fresh_attention(q, k_cache, v_cache, out, batch, plan, mask, scale, scales)
    if plan is None or len(plan.members) < len(batch.host_counts) - batch.num_singles:
        done = plan.members if plan else frozenset()
        _paged_attention(q, k_cache, v_cache, out, batch, done, mask, scale, scales)


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    done: frozenset[int],  # rows that need nothing more
    mask: Mask,
    scale: float,
    scales: KVScales | None,
) -> None:
    block_size, kv_heads = k_cache.shape[1:3]
    tile, tiles = _launch_list(q, kv_heads, out.shape[2], batch, done)
    cache = as_kernels_take_it(k_cache, v_cache, scales)
    cap_scale, score_scale = score_scales(scale, mask.softcap)
    _prefill_kernel[(kv_heads * tiles.shape[0],)](
        q, *cache.tensors, out, tiles, batch.rows, batch.q_start, batch.context, batch.block_tables,
        *q.stride()[:2], *cache.strides, *out.stride()[:2],
        batch.block_tables.stride(0), kv_heads, mask.window or 0, mask.sinks, cap_scale, score_scale,
        GROUP=q.shape[1] // kv_heads, BLOCK_SIZE=block_size, **cache.constants,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        WINDOWED=mask.window is not None, SINKS=mask.window is not None and mask.sinks > 0,
        SOFTCAP=mask.softcap is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _launch_list(
    q: torch.Tensor, kv_heads: int, value_dim: int, batch: AttentionBatch, done: frozenset[int]
) -> tuple[Tile, torch.Tensor]:
    """The launch shape, and [tiles, 2] int32: (row, tile of the row), made and copied once per step."""
    group, device = q.shape[1] // kv_heads, q.device
    name = f"prefill tiles with groups of {group}, without {len(done)} rows"  # equal in many layers
    if name not in batch.cache:
        most = max(batch.host_counts[i] for i in _chunks(batch, done))
        tile = prefill_tile(most * group, q.shape[2], value_dim, q.dtype)
        host = torch.from_numpy(_host_tile_list(batch, group, tile.block_m, done))
        batch.cache[name] = tile, host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    found: tuple[Tile, torch.Tensor] = batch.cache[name]
    return found


def _chunks(batch: AttentionBatch, done: frozenset[int]) -> list[int]:
    return [i for i in range(batch.num_singles, len(batch.host_counts)) if i not in done]


def _host_tile_list(batch: AttentionBatch, group: int, block_m: int, done: frozenset[int] = frozenset()) -> np.ndarray:
    """Tiles with most keys first, so that the last ones to end are short."""
    rows = _chunks(batch, done)
    counts = np.asarray([batch.host_counts[i] for i in rows], dtype=np.int64)
    context = np.asarray([batch.host_context[i] for i in rows], dtype=np.int64)
    owner, tile = numbered(-(-counts * group // block_m))
    keys = (context - counts)[owner] + (tile + 1) * block_m // group
    order = np.argsort(-keys, kind="stable")
    return np.stack([np.asarray(rows)[owner], tile], axis=1)[order].astype(np.int32)


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(
    do_not_specialize=["window", "sinks"],
    do_not_specialize_on_alignment=["rows", "q_start", "contexts", "tables"],
)
def _prefill_kernel(
    q,  # [tokens, heads, KEY_DIM]
    k_cache,  # [blocks, BLOCK_SIZE, kv_heads, KEY_DIM]
    v_cache,  # [blocks, BLOCK_SIZE, kv_heads, VALUE_DIM]
    k_scales,  # [blocks, BLOCK_SIZE, kv_heads, n], where the cache holds codes, in words of int32
    v_scales,
    out,  # [tokens, heads, VALUE_DIM]
    tiles,  # [tiles, 2]: (row, tile of the row)
    rows,  # [rows]
    q_start,  # [rows + 1]
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
    kv_heads,
    window,
    sinks,
    cap_scale,
    score_scale,
    GROUP: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    entry = tiles + tl.program_id(0) // kv_heads * 2
    row = tl.load(entry)
    tile = tl.load(entry + 1)
    first_token = tl.load(q_start + row)
    count = tl.load(q_start + row + 1) - first_token
    context = tl.load(contexts + row)
    table = tables + tl.load(rows + row).to(tl.int64) * stride_table
    k_head = head_of(k_cache, kv_head, stride_k_head, FORM)
    v_head = head_of(v_cache, kv_head, stride_v_head, FORM)

    # Pair m of the row is query m // GROUP with head m % GROUP of the group: a short chunk still fills the tile.
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    live = token < count
    position = context - count + token
    head = kv_head * GROUP + pair % GROUP
    q_offsets = (first_token + token).to(tl.int64) * stride_q_token + head * stride_q_head
    queries, unit = load_queries(q, q_offsets, live, KEY_DIM, FIRST, REST, FORM, KEY_WORDS)

    # Keys that some query of the tile sees: [low, high). Keys that all of them see: [full_low, full_high).
    earliest = context - count + tile * BLOCK_M // GROUP
    latest = context - count + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    low = 0
    high = latest + 1
    full_low = 0
    full_high = (earliest + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        low = tl.maximum(earliest - window + 1, 0) // BLOCK_N * BLOCK_N
        full_low = tl.minimum(tl.cdiv(tl.maximum(latest - window + 1, 0), BLOCK_N) * BLOCK_N, high)
        full_high = tl.maximum(full_high, full_low)

    acc = no_values(BLOCK_M, VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        acc, top, total = _scan(
            acc, top, total, 0, tl.minimum(tl.cdiv(sinks, BLOCK_N) * BLOCK_N, low), queries, unit, k_head, v_head,
            k_scales, v_scales, kv_head, table, position, earliest, high, window, sinks, stride_k_block,
            stride_k_token, stride_v_block, stride_v_token, cap_scale, score_scale, True, WINDOWED, SOFTCAP,
            SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST, REST, VALUE_DIM, VALUE_BLOCK, FORM, KEY_WORDS, VALUE_WORDS, PTX,
            BLOCK_N,
        )  # fmt: skip
    if WINDOWED:
        acc, top, total = _scan(
            acc, top, total, low, full_low, queries, unit, k_head, v_head,
            k_scales, v_scales, kv_head, table, position, earliest, high, window, sinks, stride_k_block,
            stride_k_token, stride_v_block, stride_v_token, cap_scale, score_scale, True, WINDOWED, SOFTCAP,
            SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST, REST, VALUE_DIM, VALUE_BLOCK, FORM, KEY_WORDS, VALUE_WORDS, PTX,
            BLOCK_N,
        )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, full_low, full_high, queries, unit, k_head, v_head,
        k_scales, v_scales, kv_head, table, position, earliest, high, window, sinks, stride_k_block,
        stride_k_token, stride_v_block, stride_v_token, cap_scale, score_scale, False, WINDOWED, SOFTCAP,
        SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST, REST, VALUE_DIM, VALUE_BLOCK, FORM, KEY_WORDS, VALUE_WORDS, PTX,
        BLOCK_N,
    )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, full_high, high, queries, unit, k_head, v_head,
        k_scales, v_scales, kv_head, table, position, earliest, high, window, sinks, stride_k_block,
        stride_k_token, stride_v_block, stride_v_token, cap_scale, score_scale, True, WINDOWED, SOFTCAP,
        SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST, REST, VALUE_DIM, VALUE_BLOCK, FORM, KEY_WORDS, VALUE_WORDS, PTX,
        BLOCK_N,
    )  # fmt: skip

    acc = whole_values(acc, FORM)
    dim = value_channels(VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS)
    place = (first_token + token).to(tl.int64) * stride_out_token + head * stride_out_head
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scan(
    acc, top, total, low, high, queries, unit, k_head, v_head, k_scales, v_scales, kv_head, table,
    position,  # [BLOCK_M] of the queries
    earliest,  # the smallest of them
    end,  # one past the largest key that any query of the tile sees
    window, sinks, stride_k_block, stride_k_token, stride_v_block, stride_v_token, cap_scale, score_scale,
    MASKED: tl.constexpr,  # whether some query may not see some key of [low, high)
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold the keys [low, high) into the softmax of every query of the tile."""
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = tl.full([BLOCK_N], True, tl.int1)
        if MASKED:
            seen = key < end
            if WINDOWED:
                seen = seen & ((key > earliest - window) | (key < sinks))
        k_offsets, v_offsets = cache_offsets(
            table, key, seen, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
            SAME_LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        k_offsets, v_offsets = of_head(k_offsets, v_offsets, kv_head, FORM)
        scores = score_keys(
            queries, unit, k_head, k_scales, k_offsets, seen, cap_scale, KEY_DIM, FIRST, REST, SOFTCAP, FORM,
            KEY_WORDS, PTX,
        )  # fmt: skip
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & ((key[None, :] > position[:, None] - window) | (key < sinks)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        acc, top, total = fold_values(
            acc, top, total, scores, v_head, v_scales, v_offsets, seen, score_scale, queries[0].dtype,
            VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS, PTX,
        )  # fmt: skip
    return acc, top, total
