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
    cache_arguments,
    load_queries,
    nothing_seen,
    value_channels,
    whole_values,
)
from tokenmill.ops.triton.attention.tile import (
    attend_tile,
    cached_head,
    key_range,
    paged_arguments,
    query_pairs,
    store_pairs,
)
from tokenmill.ops.triton.config import Tile, fitting, prefill_tile
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
    plan = fresh_plan(q, k_cache, v_cache, batch)
    if plan is not None:
        fresh_attention(q, k_cache, v_cache, out, batch, plan, mask, scale, scales)
    if plan is None or len(plan.members) < len(batch.host_counts) - batch.num_singles:
        done = plan.members if plan else frozenset()
        kv_heads = k_cache.shape[2]
        tile, tiles = _launch_list(q, kv_heads, out.shape[2], batch, done)
        cache = cache_arguments(k_cache, v_cache, scales)
        arguments, constants = paged_arguments(q, cache, batch, mask, scale, tile)
        _prefill_kernel[(kv_heads * tiles.shape[0],)](
            *arguments, out, *out.stride()[:2], tiles, batch.rows, batch.q_start, batch.context, kv_heads,
            mask.window or 0, **constants, WINDOWED=mask.window is not None,
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
        tile = fitting(tile, q.shape[2], value_dim, q.itemsize, device)
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
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["rows", "q_start", "contexts", "tables"],
)
def _prefill_kernel(
    # Of paged_arguments:
    q, k_cache, v_cache, k_scales, v_scales, tables, stride_q_token, stride_q_head, stride_k_block, stride_k_token,
    stride_k_head, stride_v_block, stride_v_token, stride_v_head, stride_table, cap_scale, score_scale,
    out,  # [tokens, heads, VALUE_DIM]
    stride_out_token, stride_out_head,
    tiles,  # [tiles, 2]: (row, tile of the row)
    rows,  # [rows]
    q_start,  # [rows + 1]
    contexts,  # [rows]
    kv_heads, window,
    GROUP: tl.constexpr, SAME_LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    entry = tiles + tl.program_id(0) // kv_heads * 2
    row = tl.load(entry)
    first_pair = tl.load(entry + 1) * BLOCK_M
    first_token = tl.load(q_start + row)
    count = tl.load(q_start + row + 1) - first_token
    before = tl.load(contexts + row) - count
    table = tables + tl.load(rows + row).to(tl.int64) * stride_table
    cached = cached_head(
        k_cache, v_cache, k_scales, v_scales, kv_head, table, stride_k_block, stride_k_token, stride_k_head,
        stride_v_block, stride_v_token, stride_v_head, FORM,
    )  # fmt: skip
    token, live, position, head, q_offsets = query_pairs(
        first_pair, count, before, first_token, kv_head, stride_q_token, stride_q_head, GROUP, BLOCK_M
    )
    queries, unit = load_queries(q, q_offsets, live, KEY_DIM, FORM)
    earliest, bounds = key_range(first_pair, count, before, window, GROUP, BLOCK_M, BLOCK_N, WINDOWED)
    acc, top, total = nothing_seen(BLOCK_M, VALUE_DIM, FORM)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        acc, top, total = _scan(
            acc, top, total, bounds[part], bounds[part + 1], queries, unit, cached, position, earliest, bounds[3],
            window, cap_scale, score_scale, part != 1, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE,
            KEY_DIM, VALUE_DIM, FORM, BLOCK_N,
        )  # fmt: skip
    dim = value_channels(VALUE_DIM, FORM)
    store_pairs(
        out, whole_values(acc, FORM), total, dim, first_token, token, head, live, stride_out_token, stride_out_head,
        VALUE_DIM,
    )  # fmt: skip


@triton.jit
def _scan(
    acc, top, total, low, high, queries, unit, cached,
    position,  # [BLOCK_M] of the queries
    earliest,  # the smallest of them
    end,  # one past the largest key that any query of the tile sees
    window, cap_scale, score_scale,
    MASKED: tl.constexpr,  # whether some query may not see some key of [low, high)
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SAME_LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, FORM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold the keys [low, high) into the softmax of every query of the tile."""
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = tl.full([BLOCK_N], True, tl.int1)
        if MASKED:
            seen = key < end
            if WINDOWED:
                seen = seen & (key > earliest - window)
        acc, top, total = attend_tile(
            acc, top, total, queries, unit, cached, key, seen, position, window, cap_scale, score_scale,
            MASKED, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, VALUE_DIM, FORM,
        )  # fmt: skip
    return acc, top, total
