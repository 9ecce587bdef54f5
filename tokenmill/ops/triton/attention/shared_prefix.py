"""Attention to a beginning that many rows share: its keys are read once, for the queries of all those rows together."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.attention.kv_codes import Cache, load_queries, nothing_seen, value_channels, whole_values
from tokenmill.ops.triton.attention.tile import attend_tile, cached_head, paged_arguments
from tokenmill.ops.triton.config import Tile
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.types import AttentionBatch, Mask


def prefix_attention(
    q: torch.Tensor,  # [tokens, heads, dim]
    cache: Cache,
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
    members = len(batch.shared_members)
    arguments, constants = paged_arguments(q, cache, batch, mask, scale, tile)
    # Programs that read the same keys follow each other.
    _prefix_kernel[(ceil_div(members * (heads // kv_heads), tile.block_m), kv_heads, splits)](
        *arguments, partial, stats, batch.shared_members, batch.shared_tokens, batch.rows, members, heads, **constants
    )


@quick_launch
@triton.jit(
    do_not_specialize=["num_members"],
    do_not_specialize_on_alignment=["stats", "members", "shared", "table_rows", "tables"],
)
def _prefix_kernel(
    # Of paged_arguments:
    q, k_cache, v_cache, k_scales, v_scales, tables, stride_q_token, stride_q_head, stride_k_block, stride_k_token,
    stride_k_head, stride_v_block, stride_v_token, stride_v_head, stride_table, cap_scale, score_scale,
    partial,  # [rows, splits, heads, VALUE_DIM] float32
    stats,  # [rows, splits, heads, 2] float32
    members,  # [num_members]: rows; -1 after the last
    shared,  # [rows]: tokens
    table_rows,  # [rows]
    num_members,
    heads,
    GROUP: tl.constexpr, SAME_LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
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
    cached = cached_head(
        k_cache, v_cache, k_scales, v_scales, kv_head, table, stride_k_block, stride_k_token, stride_k_head,
        stride_v_block, stride_v_token, stride_v_head, FORM,
    )  # fmt: skip

    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    member = query // GROUP
    row = tl.load(members + member, mask=member < num_members, other=-1).to(tl.int64)
    live = row >= 0
    head = kv_head * GROUP + query % GROUP
    q_offsets = row * stride_q_token + head * stride_q_head
    queries, unit = load_queries(q, q_offsets, live, KEY_DIM, FORM)
    acc, top, total = nothing_seen(BLOCK_M, VALUE_DIM, FORM)
    for tile in range(begin, whole):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = tl.full([BLOCK_N], True, tl.int1)
        acc, top, total = attend_tile(
            acc, top, total, queries, unit, cached, key, seen, None, 0, cap_scale, score_scale,
            False, False, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, VALUE_DIM, FORM,
        )  # fmt: skip
    if whole < end:  # the last tile of all, where the prefix ends inside it
        key = whole * BLOCK_N + tl.arange(0, BLOCK_N)
        acc, top, total = attend_tile(
            acc, top, total, queries, unit, cached, key, key < length, None, 0, cap_scale, score_scale,
            True, False, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, VALUE_DIM, FORM,
        )  # fmt: skip

    acc = whole_values(acc, FORM)
    dim = value_channels(VALUE_DIM, FORM)
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    place = (row * splits + split) * heads + head
    tl.store(partial + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=inside)
    tl.store(stats + place * 2, top, mask=live)
    tl.store(stats + place * 2 + 1, total, mask=live)
