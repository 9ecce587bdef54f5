"""Attention for rows with several queries: tiles of (query, head of the group) pairs scan the paged cache once."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.attention_fresh import fresh_attention, fresh_plan, numbered
from tokenmill.ops.triton.config import Tile, power_of_two, prefill_tile, split_head
from tokenmill.ops.triton.launch import quick_launch
from tokenmill.ops.triton.paging import cache_offsets, fold, load_rows, score, score_scales
from tokenmill.ops.types import AttentionBatch, Mask


def prefill_attention(
    q: torch.Tensor,  # [tokens, heads, dim]; the tokens after the first num_singles are used
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]
    out: torch.Tensor,  # [tokens, heads, v_dim]
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
) -> None:
    plan = fresh_plan(q, k_cache, v_cache, batch, mask)
    if plan is not None:
        fresh_attention(q, k_cache, v_cache, out, batch, plan, mask, scale)
    if plan is None or len(plan.members) < len(batch.host_counts) - batch.num_singles:
        _paged_attention(q, k_cache, v_cache, out, batch, plan.members if plan else frozenset(), mask, scale)


def _paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    done: frozenset[int],  # rows that need nothing more
    mask: Mask,
    scale: float,
) -> None:
    heads, key_dim = q.shape[1], q.shape[2]
    block_size, kv_heads, value_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    group = heads // kv_heads
    tile, tiles = _launch_list(q, kv_heads, value_dim, batch, done)
    head = split_head(key_dim)
    cap_scale, score_scale = score_scales(scale, mask.softcap)
    _prefill_kernel[(kv_heads * tiles.shape[0],)](
        q, k_cache, v_cache, out, tiles, batch.rows, batch.q_start, batch.context, batch.block_tables,
        *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2],
        batch.block_tables.stride(0), kv_heads, mask.window or 0, mask.sinks, cap_scale, score_scale,
        GROUP=group, SAME_LAYOUT=k_cache.stride() == v_cache.stride(), BLOCK_SIZE=block_size,
        KEY_DIM=key_dim, FIRST=head.first, REST=head.rest, VALUE_DIM=value_dim,
        VALUE_BLOCK=max(16, power_of_two(value_dim)), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
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
    k_head = k_cache + kv_head * stride_k_head
    v_head = v_cache + kv_head * stride_v_head

    # Pair m of the row is query m // GROUP with head m % GROUP of the group: a short chunk still fills the tile.
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    live = token < count
    position = context - count + token
    head = kv_head * GROUP + pair % GROUP
    q_offsets = (first_token + token).to(tl.int64) * stride_q_token + head * stride_q_head
    q_first = load_rows(q, q_offsets, live, KEY_DIM if KEY_DIM < FIRST else FIRST, FIRST)
    q_rest = q_first
    if REST > 0:
        q_rest = load_rows(q + FIRST, q_offsets, live, KEY_DIM - FIRST, REST)

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

    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        acc, top, total = _scan(
            acc, top, total, 0, tl.minimum(tl.cdiv(sinks, BLOCK_N) * BLOCK_N, low), q_first, q_rest, k_head, v_head,
            table, position, earliest, high, window, sinks, stride_k_block, stride_k_token, stride_v_block,
            stride_v_token, cap_scale, score_scale, True, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST,
            REST, VALUE_DIM, VALUE_BLOCK, BLOCK_N,
        )  # fmt: skip
    if WINDOWED:
        acc, top, total = _scan(
            acc, top, total, low, full_low, q_first, q_rest, k_head, v_head,
            table, position, earliest, high, window, sinks, stride_k_block, stride_k_token, stride_v_block,
            stride_v_token, cap_scale, score_scale, True, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST,
            REST, VALUE_DIM, VALUE_BLOCK, BLOCK_N,
        )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, full_low, full_high, q_first, q_rest, k_head, v_head,
        table, position, earliest, high, window, sinks, stride_k_block, stride_k_token, stride_v_block,
        stride_v_token, cap_scale, score_scale, False, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST,
        REST, VALUE_DIM, VALUE_BLOCK, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _scan(
        acc, top, total, full_high, high, q_first, q_rest, k_head, v_head,
        table, position, earliest, high, window, sinks, stride_k_block, stride_k_token, stride_v_block,
        stride_v_token, cap_scale, score_scale, True, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, FIRST,
        REST, VALUE_DIM, VALUE_BLOCK, BLOCK_N,
    )  # fmt: skip

    dim = tl.arange(0, VALUE_BLOCK)
    place = (first_token + token).to(tl.int64) * stride_out_token + head * stride_out_head
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scan(
    acc, top, total, low, high, q_first, q_rest, k_head, v_head, table,
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
        scores = score(q_first, q_rest, k_head, k_offsets, seen, cap_scale, KEY_DIM, FIRST, REST, SOFTCAP)
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & ((key[None, :] > position[:, None] - window) | (key < sinks)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        values = load_rows(v_head, v_offsets, seen, VALUE_DIM, VALUE_BLOCK).to(q_first.dtype)
        acc, top, total = fold(acc, top, total, scores, values, score_scale)
    return acc, top, total
