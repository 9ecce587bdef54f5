"""Attention for rows with one query: the device deals parts of their keys to programs, and joins what they find.

Rows that verify drafts have several, one behind the other (`AttentionBatch.queries`): a program takes all of them
through the row's keys at once. They may be the nodes of a tree, of which each sees its ancestors (`tails`).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.kv_forms import KVScales, form_of
from tokenmill.ops.triton.attention.join import join_kernel, joined, pair_place
from tokenmill.ops.triton.attention.kv_codes import (
    cache_arguments,
    load_queries,
    nothing_seen,
    value_channels,
    whole_values,
)
from tokenmill.ops.triton.attention.kv_transposed import attend_transposed
from tokenmill.ops.triton.attention.paging import merged, node_seen, padded_block
from tokenmill.ops.triton.attention.shared_prefix import prefix_attention
from tokenmill.ops.triton.attention.tile import attend_tile, cached_head, paged_arguments
from tokenmill.ops.triton.config import (
    Tile,
    decode_splits,
    decode_tile,
    fitting,
    power_of_two,
    prefix_splits,
    prefix_tile,
    reads_transposed,
)
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.types import AttentionBatch, Mask

# Of an item: row, first tile, end tile, part, parts to join, table row, context, and its first key; of several queries
# the context is the first one's, and in place of a first key is the last one's.
_FIELDS = tl.constexpr(8)
# The program that ends last joins a row's parts where they are small; elsewhere a second kernel, spread over heads.
_JOIN_IN_PLACE = 2048  # elements of one part
_JOIN_QUERIES_IN_PLACE = 512  # where a row has several queries: a program of its own for every pair is faster
_LONE_ROW_BYTES = 1024  # of a key and a value, up to which the queries of a lone row go by themselves
_JOIN_TILE = 4096  # elements that a join holds at once, with two warps or more


@dataclass(frozen=True)
class DecodePlan:
    """Who reads which keys: made on the device once per step, for all layers with the same mask."""

    queries: int  # of each row
    tile: Tile
    transposed: bool  # keys and values are the left operands of products
    head_tiles: int
    shared: bool  # the rows' common beginning is computed apart
    prefix_tile: Tile
    prefix_splits: int
    num_items: int  # programs per kv head
    num_slots: int  # rows of partial results that parts of the rows' own keys may take
    items: torch.Tensor  # [num_items, 8] int32
    joins: torch.Tensor  # [rows, 3] int32: how many parts the row has to join (0: none), its first slot, is it a member
    counters: torch.Tensor  # [num_slots, kv_heads] int32: parts that are done; zero between layers


def decode_attention(
    q: torch.Tensor,  # [tokens, heads, dim]; the first num_singles tokens are used
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim]
    out: torch.Tensor,  # [tokens, heads, v_dim]
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,
) -> None:
    heads = q.shape[1]
    kv_heads, value_dim = k_cache.shape[2], out.shape[2]
    cache = cache_arguments(k_cache, v_cache, scales)
    form = "" if scales is None else form_of(k_cache).name
    name = f"decode plan: {heads} {kv_heads} {q.shape[2]} {value_dim} {mask.window} {form}"  # equal in many layers
    if name not in batch.cache:
        batch.cache[name] = _make_plan(q, kv_heads, value_dim, batch, mask, form)
    plan: DecodePlan = batch.cache[name]
    tile, value_block = plan.tile, max(16, power_of_two(value_dim))
    rows, pairs = batch.num_singles // plan.queries, heads // kv_heads * plan.queries  # of a query and a head
    # Parts of the rows' own keys come first, then prefix_splits parts per row of what they share.
    slots = plan.num_slots + rows * plan.prefix_splits
    partial = torch.empty(slots, kv_heads * pairs, value_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(slots, kv_heads * pairs, 2, dtype=torch.float32, device=q.device)
    if plan.shared:
        first = plan.num_slots
        prefix_attention(
            q, cache, partial[first:], stats[first:], batch, mask, scale, plan.prefix_tile, plan.prefix_splits
        )
    join_heads, join_tile = power_of_two(pairs), min(_JOIN_TILE, _JOIN_TILE // 2 * tile.num_warps)
    most = _JOIN_IN_PLACE if plan.queries == 1 else _JOIN_QUERIES_IN_PLACE
    in_place = plan.head_tiles == 1 and join_heads * value_block <= most
    arguments, constants = paged_arguments(q, cache, batch, mask, scale, tile)
    _decode_kernel[(kv_heads * plan.head_tiles, plan.num_items)](
        *arguments, out, *out.stride()[:2], partial, stats, plan.items, plan.joins, plan.counters,
        kv_heads * pairs, plan.num_slots, plan.prefix_splits, mask.window or 0,
        plan.items if batch.tails is None else batch.tails,
        **constants, NODES=0 if batch.tails is None else batch.queries, FANOUT=batch.fanout, QUERIES=plan.queries,
        WINDOWED=mask.window is not None, HEAD_TILES=plan.head_tiles,
        TRANSPOSED_HEADS=kv_heads if plan.transposed else 0, SHARED=plan.shared,
        JOIN_HEADS=join_heads if in_place else 0, JOIN_PARTS=max(1, join_tile // (join_heads * value_block)),
    )  # fmt: skip
    if not in_place:
        join_kernel[(kv_heads * pairs, rows)](
            partial, stats, out, plan.joins, out.stride(0), out.stride(1), kv_heads * pairs, plan.num_slots,
            plan.prefix_splits, GROUP=heads // kv_heads, QUERIES=plan.queries, VALUE_DIM=value_dim,
            JOIN_PARTS=max(1, _JOIN_TILE // value_block), num_warps=4,
        )  # fmt: skip


def _make_plan(
    q: torch.Tensor, kv_heads: int, value_dim: int, batch: AttentionBatch, mask: Mask, form: str
) -> DecodePlan:
    heads, key_dim = q.shape[1], q.shape[2]
    transposed = reads_transposed(form, key_dim, value_dim, q.dtype)
    together = batch.shared_members is not None and mask.window is None
    # Little that one row has cached is read again sooner than what several queries found is joined.
    lone = batch.num_singles == batch.queries and kv_heads * (key_dim + value_dim) * q.itemsize <= _LONE_ROW_BYTES
    queries = 1 if transposed or together or (lone and batch.tails is None) else batch.queries
    rows, group = batch.num_singles // queries, heads // kv_heads * queries
    heads = heads * queries
    tile = decode_tile(group, key_dim, value_dim, q.dtype, rows * kv_heads, form if transposed else None)
    tile = fitting(tile, key_dim, value_dim, q.itemsize, q.device)
    head_tiles = ceil_div(group, tile.block_m)
    extra, least_tiles = decode_splits(rows, kv_heads * head_tiles, heads, value_dim, tile, q.device, queries)
    num_slots = extra + min(rows, extra)  # rows in several parts have at most `extra` parts more than there are of them
    shared_tile, splits = tile, 0
    if together:
        assert batch.shared_members is not None
        sharing = len(batch.shared_members) * group
        shared_tile = prefix_tile(sharing, key_dim, value_dim, q.dtype)
        shared_tile = fitting(shared_tile, key_dim, value_dim, q.itemsize, q.device)
        programs = kv_heads * ceil_div(sharing, shared_tile.block_m)
        splits = prefix_splits(rows, num_slots, programs, heads, value_dim, q.device)
    device = q.device
    plan = DecodePlan(
        queries=queries,
        tile=tile,
        transposed=transposed,
        head_tiles=head_tiles,
        shared=splits > 0,
        prefix_tile=shared_tile,
        prefix_splits=splits,
        num_items=rows + extra,
        num_slots=num_slots,
        items=torch.empty(rows + extra, _FIELDS.value, dtype=torch.int32, device=device),
        joins=torch.empty(rows, 3, dtype=torch.int32, device=device),
        counters=torch.empty(num_slots, kv_heads, dtype=torch.int32, device=device),
    )
    _plan_kernel[(1,)](
        plan.items, plan.joins, plan.counters, batch.rows, batch.context,
        batch.shared_tokens if plan.shared else batch.context,
        rows, plan.num_items, plan.counters.numel(), extra, least_tiles, mask.window or 0,
        AHEAD=batch.queries if batch.tails is not None and queries == 1 else 0, QUERIES=queries,
        WINDOWED=mask.window is not None, SHARED=plan.shared, BLOCK_N=tile.block_n,
        ROWS=max(256, power_of_two(rows)), num_warps=4,
    )  # fmt: skip
    return plan


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _first_tile(context, window, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first tile with a key that a windowed row sees; its tiles are numbered from there.

    AHEAD: by how much places may be ahead of positions, at most.
    """
    return tl.maximum(context - AHEAD - window, 0) // BLOCK_N


# Numbers and small tensors whose value or alignment changes from step to step must not compile a kernel anew.
@quick_launch
@triton.jit(
    do_not_specialize=["rows", "num_items", "num_counters", "extra", "least_tiles", "window"],
    do_not_specialize_on_alignment=["table_rows", "contexts", "shared"],
)
def _plan_kernel(
    items,  # [num_items, 8]
    joins,  # [rows, 3]
    counters,  # [num_counters]
    table_rows,  # [rows, QUERIES]
    contexts,  # [rows, QUERIES]
    shared,  # [rows]; not read unless SHARED
    rows,
    num_items,
    num_counters,
    extra,
    least_tiles,
    window,
    AHEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Cut rows that have far more than their share of all keys, and list the parts of all rows."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.arange(0, ROWS)
    live = row < rows
    context = tl.load(contexts + row * QUERIES, mask=live, other=0)
    table_row = tl.load(table_rows + row * QUERIES, mask=live, other=0)
    last = context  # that a query of the row sees: those that are nobody's see nothing
    for query in tl.static_range(1, QUERIES):
        last = tl.maximum(last, tl.load(contexts + row * QUERIES + query, mask=live, other=0))
    start = tl.zeros_like(context)
    if SHARED:
        start = tl.minimum(tl.load(shared + row, mask=live, other=0), context)
    tiles = tl.cdiv(last - start, BLOCK_N)
    if WINDOWED:
        tiles = tl.cdiv(last, BLOCK_N) - _first_tile(context, window, AHEAD, BLOCK_N)
    most = tl.maximum(tl.cdiv(tl.sum(tiles, 0), extra), least_tiles)
    # A padding row has no keys, but its zeros must be written, too.
    parts = tl.where(live, tl.maximum(tl.cdiv(tiles, most), 1), 0)
    end = tl.cumsum(parts, 0)
    joined = tl.where(parts > 1, parts, 0)
    slot = tl.cumsum(joined, 0) - joined
    tl.store(joins + row * 3, joined, mask=live)
    tl.store(joins + row * 3 + 1, slot, mask=live)
    tl.store(joins + row * 3 + 2, (start > 0).to(tl.int32), mask=live)
    for part in range(0, tl.max(parts, 0)):
        mine = part < parts
        item = items + (end - parts + part) * _FIELDS
        tl.store(item, row, mask=mine)
        tl.store(item + 1, part * tiles // tl.maximum(parts, 1), mask=mine)
        tl.store(item + 2, (part + 1) * tiles // tl.maximum(parts, 1), mask=mine)
        tl.store(item + 3, part, mask=mine)
        tl.store(item + 4, joined, mask=mine)
        tl.store(item + 5, table_row, mask=mine)
        tl.store(item + 6, context, mask=mine)
        if QUERIES > 1:
            tl.store(item + 7, last, mask=mine)
        else:
            tl.store(item + 7, start, mask=mine)
    used = tl.sum(parts, 0)
    for at in range(0, num_items, ROWS):
        tl.store(items + (at + row) * _FIELDS, -1, mask=(at + row >= used) & (at + row < num_items))
    for at in range(0, num_counters, ROWS):
        tl.store(counters + at + row, 0, mask=at + row < num_counters)


@quick_launch
@triton.jit(
    do_not_specialize=["num_slots", "prefix_splits", "window"],
    do_not_specialize_on_alignment=["tables", "tails"],
)
def _decode_kernel(
    # Of paged_arguments:
    q, k_cache, v_cache, k_scales, v_scales, tables, stride_q_token, stride_q_head, stride_k_block, stride_k_token,
    stride_k_head, stride_v_block, stride_v_token, stride_v_head, stride_table, cap_scale, score_scale,
    out,  # [tokens, heads, VALUE_DIM]
    stride_out_token, stride_out_head,
    partial,  # [slots, heads, VALUE_DIM] float32; a head is a pair of query and head here, those of a kv head together
    stats,  # [slots, heads, 2] float32
    items,  # [items, 8]
    joins,  # [rows, 3]
    counters,  # [num_slots, kv_heads]
    heads, num_slots, prefix_splits, window,
    tails,  # [tokens]; not read unless NODES
    GROUP: tl.constexpr, SAME_LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    NODES: tl.constexpr,  # of a row's tree, with its root; 0 where there is none
    FANOUT: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TRANSPOSED_HEADS: tl.constexpr,  # kv heads, where codes are read as left operands; 0 elsewhere
    SHARED: tl.constexpr,  # the kernel before this one computed the rows' common beginning
    JOIN_HEADS: tl.constexpr,  # 0: another kernel joins
    JOIN_PARTS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    kv_head = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    item = items + tl.program_id(1) * _FIELDS
    row = tl.load(item).to(tl.int64)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    part = tl.load(item + 3)
    parts = tl.load(item + 4)
    table = tables + tl.load(item + 5).to(tl.int64) * stride_table
    context = tl.load(item + 6)
    own = 0
    last = context
    if QUERIES > 1:
        last = tl.load(item + 7)
    else:
        own = tl.load(item + 7)
    if row < 0:
        return
    first_slot = tl.load(joins + row * 3 + 1).to(tl.int64)
    PAIRS: tl.constexpr = GROUP * QUERIES
    in_group = (tl.program_id(0) % HEAD_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = in_group < PAIRS
    head = kv_head * PAIRS + in_group
    position = None
    if QUERIES > 1:
        position = context - 1 + in_group // GROUP
    # Of a tree: its root's place, and what queries see of it; a program may have one query of it, or all.
    root = context - 1
    tail = 0
    TREE: tl.constexpr = FANOUT if NODES > 0 else 0
    AHEAD: tl.constexpr = NODES if QUERIES == 1 else 0
    if NODES > 0:
        if QUERIES > 1:
            tail = tl.load(tails + row * NODES + in_group // GROUP, mask=live, other=0)
            position = root + (in_group // GROUP + FANOUT - 1) // FANOUT
        else:
            number = (row % NODES).to(tl.int32)
            tail = tl.load(tails + row)
            root = context - 1 - number
            position = root + (number + FANOUT - 1) // FANOUT
    first = 0
    if WINDOWED:
        first = _first_tile(context, window, AHEAD, BLOCK_N)
    if TRANSPOSED_HEADS > 0:
        skipped = (tl.program_id(0) % HEAD_TILES) * BLOCK_M
        acc, top, total = attend_transposed(
            q + row * stride_q_token + (kv_head * GROUP + skipped) * stride_q_head, stride_q_head, GROUP - skipped,
            k_cache, v_cache, k_scales, v_scales, table, kv_head, begin, end, own, context, first,
            window, cap_scale, score_scale,
            TRANSPOSED_HEADS, BLOCK_SIZE, KEY_DIM, FORM, BLOCK_M, BLOCK_N, WINDOWED, SOFTCAP,
            tail, root, position, TREE,
        )  # fmt: skip
        dim = tl.arange(0, VALUE_DIM)
    else:
        cached = cached_head(
            k_cache, v_cache, k_scales, v_scales, kv_head, table, stride_k_block, stride_k_token, stride_k_head,
            stride_v_block, stride_v_token, stride_v_head, FORM,
        )  # fmt: skip
        q_offsets = pair_place(row, kv_head, in_group, stride_q_token, stride_q_head, GROUP, QUERIES)
        queries, unit = load_queries(q, q_offsets, live, KEY_DIM, FORM)
        acc, top, total = nothing_seen(BLOCK_M, VALUE_DIM, FORM)
        nodes = 0
        if NODES > 0:  # what no query sees may hold anything
            nodes = tail
            if QUERIES > 1:
                nodes = tl.reduce(tail, 0, _either)
        for tile in range(begin, end):
            start = own + tile * BLOCK_N
            if WINDOWED:
                start = (tile + first) * BLOCK_N
            key = start + tl.arange(0, BLOCK_N)
            seen = key < last
            if NODES > 0:
                seen = seen & node_seen(nodes, key, root)
            if WINDOWED:
                seen = seen & (key >= context - window)
            acc, top, total = attend_tile(
                acc, top, total, queries, unit, cached, key, seen, position, window, cap_scale, score_scale,
                True, WINDOWED, SOFTCAP, SAME_LAYOUT, BLOCK_SIZE, KEY_DIM, VALUE_DIM, FORM, tail, root, TREE,
            )  # fmt: skip
        acc = whole_values(acc, FORM)
        dim = value_channels(VALUE_DIM, FORM)
    inside = live[:, None] & (dim < VALUE_DIM)[None, :]
    if parts == 0:
        if SHARED:
            for split in tl.range(0, tl.where(own > 0, prefix_splits, 0), num_stages=1):
                place = (num_slots + row * prefix_splits + split) * heads + head
                other_top = tl.load(stats + place * 2, mask=live, other=float("-inf"))
                other_total = tl.load(stats + place * 2 + 1, mask=live, other=0.0)
                values = tl.load(partial + place[:, None] * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
                acc, top, total = merged(acc, top, total, values, other_top, other_total)
        # A padding row has no keys at all: it gets zeros.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = pair_place(row, kv_head, in_group, stride_out_token, stride_out_head, GROUP, QUERIES)
        tl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)
        return
    place = (first_slot + part) * heads + head
    tl.store(partial + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=inside)
    tl.store(stats + place * 2, top, mask=live)
    tl.store(stats + place * 2 + 1, total, mask=live)
    if JOIN_HEADS > 0:
        tl.debug_barrier()  # all threads have written their share of the part before one of them says so
        counter = counters + first_slot * tl.num_programs(0) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != parts - 1:
            return
        tl.store(counter, 0)  # for the next layer
        joint = joined(
            partial, stats, first_slot, parts, num_slots + row * prefix_splits, tl.where(own > 0, prefix_splits, 0),
            kv_head * PAIRS, heads, PAIRS, VALUE_DIM, JOIN_HEADS, JOIN_PARTS,
        )  # fmt: skip
        in_join = tl.arange(0, JOIN_HEADS)
        dim = tl.arange(0, padded_block(VALUE_DIM))
        place = pair_place(row, kv_head, in_join, stride_out_token, stride_out_head, GROUP, QUERIES)
        inside = (in_join < PAIRS)[:, None] & (dim < VALUE_DIM)[None, :]
        tl.store(out + place[:, None] + dim[None, :], joint.to(out.dtype.element_ty), mask=inside)
