"""Attention to a beginning that many rows share: its keys are read once, for the queries of all those rows together."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.attention.kv_codes import (
    Cache,
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
from tokenmill.ops.triton.config import Tile
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.types import AttentionBatch, Mask


def prefix_attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    cache: Cache,
    block_size: int,
    partial: torch.Tensor,  # [rows * splits, heads, v_dim] float32
    stats: torch.Tensor,  # [rows * splits, heads, 2] float32: largest score, total
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    tile: Tile,
    splits: int,
) -> None:
    """Partial results of the members of batch.shared_members; what other rows have there is left alone."""
    assert batch.shared_members is not None and batch.shared_tokens is not None and mask.window is None
    heads, kv_heads = q.shape[1], cache.tensors[0].shape[2]
    members, group = len(batch.shared_members), heads // kv_heads
    cap_scale, score_scale = score_scales(scale, mask.softcap)
    # Programs that read the same keys follow each other.
    _prefix_kernel[(ceil_div(members * group, tile.block_m), kv_heads, splits)](
        q, *cache.tensors, partial, stats, batch.shared_members, batch.shared_tokens, batch.rows, batch.block_tables,
        q.stride(0), q.stride(1), *cache.strides, batch.block_tables.stride(0),
        members, heads, cap_scale, score_scale,
        GROUP=group, BLOCK_SIZE=block_size, **cache.constants, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        SOFTCAP=mask.softcap is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@quick_launch
@triton.jit(
    do_not_specialize=["num_members"],
    do_not_specialize_on_alignment=["stats", "members", "shared", "table_rows", "tables"],
)
def _prefix_kernel(
    q,  # [tokens, heads, KEY_DIM]
    k_cache,  # [blocks, BLOCK_SIZE, kv_heads, KEY_DIM]
    v_cache,  # [blocks, BLOCK_SIZE, kv_heads, VALUE_DIM]
    k_scales,  # [blocks, BLOCK_SIZE, kv_heads, n], where the cache holds codes, in words of int32
    v_scales,
    partial,  # [rows, splits, heads, VALUE_DIM] float32
    stats,  # [rows, splits, heads, 2] float32
    members,  # [num_members]: rows; -1 after the last
    shared,  # [rows]: tokens
    table_rows,  # [rows]
    tables,  # [max_rows, max_blocks]
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_table,
    num_members,
    heads,
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
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    first_member = tl.program_id(0) * BLOCK_M // GROUP
    if tl.load(members + first_member) < 0:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    leader = tl.load(members)  # any member's table begins with the shared blocks
    table = tables + tl.load(table_rows + leader).to(tl.int64) * stride_table
    length = tl.load(shared + leader)
    tiles = tl.cdiv(length, BLOCK_N)
    splits = tl.num_programs(2)
    begin = split * tiles // splits
    end = (split + 1) * tiles // splits
    whole = tl.minimum(end, length // BLOCK_N)
    k_head = head_of(k_cache, kv_head, stride_k_head, FORM)
    v_head = head_of(v_cache, kv_head, stride_v_head, FORM)

    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    member = query // GROUP
    row = tl.load(members + member, mask=member < num_members, other=-1).to(tl.int64)
    live = row >= 0
    head = kv_head * GROUP + query % GROUP
    q_offsets = row * stride_q_token + head * stride_q_head
    queries, unit = load_queries(q, q_offsets, live, KEY_DIM, FIRST, REST, FORM, KEY_WORDS)
    acc = no_values(BLOCK_M, VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(begin, whole):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = tl.full([BLOCK_N], True, tl.int1)
        k_offsets, v_offsets = cache_offsets(
            table, position, seen, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
            SAME_LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        k_offsets, v_offsets = of_head(k_offsets, v_offsets, kv_head, FORM)
        scores = score_keys(
            queries, unit, k_head, k_scales, k_offsets, seen, cap_scale, KEY_DIM, FIRST, REST, SOFTCAP, FORM,
            KEY_WORDS, PTX,
        )  # fmt: skip
        acc, top, total = fold_values(
            acc, top, total, scores, v_head, v_scales, v_offsets, seen, score_scale, queries[0].dtype,
            VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS, PTX,
        )  # fmt: skip
    if whole < end:  # the last tile of all, where the prefix ends inside it
        position = whole * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = position < length
        k_offsets, v_offsets = cache_offsets(
            table, position, seen, stride_k_block, stride_k_token, stride_v_block, stride_v_token,
            SAME_LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        k_offsets, v_offsets = of_head(k_offsets, v_offsets, kv_head, FORM)
        scores = score_keys(
            queries, unit, k_head, k_scales, k_offsets, seen, cap_scale, KEY_DIM, FIRST, REST, SOFTCAP, FORM,
            KEY_WORDS, PTX,
        )  # fmt: skip
        scores = tl.where(seen[None, :], scores, float("-inf"))
        acc, top, total = fold_values(
            acc, top, total, scores, v_head, v_scales, v_offsets, seen, score_scale, queries[0].dtype,
            VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS, PTX,
        )  # fmt: skip

    acc = whole_values(acc, FORM)
    dim = value_channels(VALUE_DIM, VALUE_BLOCK, FORM, VALUE_WORDS)
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    place = (row * splits + split) * heads + head
    tl.store(partial + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=inside)
    tl.store(stats + place * 2, top, mask=live)
    tl.store(stats + place * 2 + 1, total, mask=live)
