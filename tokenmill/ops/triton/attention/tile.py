"""What all kernels over the paged cache share: their common arguments, and a tile of queries against a tile of keys."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.attention.kv_codes import FLOATS, Cache, fold_values, score_keys
from tokenmill.ops.triton.attention.paging import cache_offsets, node_position, node_seen, score_scales
from tokenmill.ops.triton.config import Tile
from tokenmill.ops.types import AttentionBatch, Mask


def paged_arguments(
    q: torch.Tensor, cache: Cache, batch: AttentionBatch, mask: Mask, scale: float, tile: Tile
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a kernel's signature begins with, in this order, and the constants and options that all of them have.

    q                     [tokens, heads, KEY_DIM]
    k_cache, v_cache      [blocks, BLOCK_SIZE, kv_heads, KEY_DIM], [..., VALUE_DIM]
    k_scales, v_scales    [blocks, BLOCK_SIZE, kv_heads, n], where the cache holds codes, in words of int32
    tables                [max_rows, max_blocks]
    stride_...            of q: token, head; of keys and of values: block, token, head; of the tables: row
    cap_scale, score_scale  of `score_scales`
    """
    arguments = (
        q, *cache.tensors, batch.block_tables, *q.stride()[:2], *cache.strides, batch.block_tables.stride(0),
        *score_scales(scale, mask.softcap),
    )  # fmt: skip
    constants = cache.constants | {
        "GROUP": q.shape[1] // cache.tensors[0].shape[2],
        "SOFTCAP": mask.softcap is not None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return arguments, constants


@triton.jit
def cached_head(
    k_cache, v_cache, k_scales, v_scales, kv_head, table, stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head, FORM: tl.constexpr,
):  # fmt: skip
    """One row's keys and values of a head, as attend_tile takes them; of codes offsets count heads."""
    if FORM == FLOATS:
        k_cache += kv_head * stride_k_head
        v_cache += kv_head * stride_v_head
    strides = (stride_k_block, stride_k_token, stride_v_block, stride_v_token)
    return k_cache, v_cache, k_scales, v_scales, kv_head, table, strides


@triton.jit
def attend_tile(
    acc, top, total,  # of nothing_seen
    queries, unit,  # of load_queries
    head,  # of cached_head
    key,  # [BLOCK_N]: positions
    seen,  # [BLOCK_N] bool: what no query sees is not read
    position,  # [BLOCK_M] of the queries, which see what is not behind them; None: they see what is seen
    window, cap_scale, score_scale,
    MASKED: tl.constexpr,  # whether some query may not see some key
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SAME_LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, FORM: tl.constexpr,
    tails=None,  # [BLOCK_M]: queries are nodes of a tree, and see of these what has its bit here
    root=None,  # where the tree begins
    FANOUT: tl.constexpr = 0,
):  # fmt: skip
    """Fold these keys into the online softmax of every query."""
    k_cache, v_cache, k_scales, v_scales, kv_head, table, strides = head
    k_offsets, v_offsets = cache_offsets(
        table, key, seen, strides[0], strides[1], strides[2], strides[3], SAME_LAYOUT, BLOCK_SIZE
    )
    if FORM != FLOATS:
        k_offsets, v_offsets = k_offsets + kv_head, v_offsets + kv_head
    scores = score_keys(queries, unit, k_cache, k_scales, k_offsets, seen, cap_scale, KEY_DIM, SOFTCAP, FORM)
    if MASKED:
        if position is None:
            visible = seen[None, :]
        else:
            stands = key
            if FANOUT > 0:
                visible = node_seen(tails[:, None], key[None, :], root)
                stands = node_position(key, root, FANOUT)
            else:
                visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & (stands[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    return fold_values(
        acc, top, total, scores, v_cache, v_scales, v_offsets, seen, score_scale, queries[0].dtype, VALUE_DIM, FORM
    )


@triton.jit
def query_pairs(
    first_pair, count, before, first_token, kv_head, stride_token, stride_head,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Pair m of a row is query m // GROUP with head m % GROUP of the group: a short chunk still fills the tile.

    The pairs' tokens, whether there are such, their positions and heads, and where their queries begin.
    """
    pair = first_pair + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    live = token < count
    position = before + token
    head = kv_head * GROUP + pair % GROUP
    return token, live, position, head, (first_token + token).to(tl.int64) * stride_token + head * stride_head


@triton.jit
def key_range(
    first_pair, count, before, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Of a tile of pairs: its earliest query, and (low, full_low, full_high, high). Some query sees the keys of
    [low, high), and all queries see those of [full_low, full_high).
    """
    earliest = before + first_pair // GROUP
    latest = before + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, count - 1)
    low = 0
    full_low = 0
    high = latest + 1
    full_high = (earliest + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        low = tl.maximum(earliest - window + 1, 0) // BLOCK_N * BLOCK_N
        full_low = tl.minimum(tl.cdiv(tl.maximum(latest - window + 1, 0), BLOCK_N) * BLOCK_N, high)
        full_high = tl.maximum(full_high, full_low)
    return earliest, (low, full_low, full_high, high)


@triton.jit
def store_pairs(
    out, acc, total, dim, first_token, token, head, live, stride_token, stride_head, VALUE_DIM: tl.constexpr
):
    place = (first_token + token).to(tl.int64) * stride_token + head * stride_head
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a query past the row's last one may have seen no key
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)
