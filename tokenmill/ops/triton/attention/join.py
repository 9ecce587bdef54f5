"""Joins the partial results of rows whose keys several programs have read."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.attention.paging import padded_block
from tokenmill.ops.triton.launch import quick_launch, start_next, wait_for_previous


@triton.jit
def pair_place(row, kv_head, pair, stride_token, stride_head, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Where pairs of a query and a head of a kv head's group begin."""
    return (row * QUERIES + pair // GROUP) * stride_token + (kv_head * GROUP + pair % GROUP) * stride_head


@quick_launch
@triton.jit(do_not_specialize=["num_slots", "prefix_splits"])
def join_kernel(
    partial,  # [slots, heads, VALUE_DIM] float32
    stats,  # [slots, heads, 2] float32
    out,  # [tokens, heads, VALUE_DIM]
    joins,  # [rows, 3]
    stride_out_token,
    stride_out_head,
    heads,
    num_slots,
    prefix_splits,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    JOIN_PARTS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    parts = tl.load(joins + row * 3)
    first_slot = tl.load(joins + row * 3 + 1).to(tl.int64)
    prefix_parts = tl.load(joins + row * 3 + 2) * prefix_splits
    if parts == 0:
        return
    joint = joined(
        partial, stats, first_slot, parts, num_slots + row * prefix_splits, prefix_parts,
        head, heads, 1, VALUE_DIM, 1, JOIN_PARTS,
    )  # fmt: skip
    dim = tl.arange(0, padded_block(VALUE_DIM))
    PAIRS: tl.constexpr = GROUP * QUERIES
    target = out + dim
    target += pair_place(row, head // PAIRS, head % PAIRS, stride_out_token, stride_out_head, GROUP, QUERIES)
    tl.store(target[None, :], joint.to(out.dtype.element_ty), mask=(dim < VALUE_DIM)[None, :])


@triton.jit
def joined(
    partial,  # [slots, heads, VALUE_DIM] float32
    stats,  # [slots, heads, 2] float32
    first_slot,
    parts,
    prefix_slot,
    prefix_parts,
    first_head,
    heads,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    JOIN_HEADS: tl.constexpr,
    JOIN_PARTS: tl.constexpr,
):  # [JOIN_HEADS, VALUE_BLOCK] float32
    """The attention of some heads of a row, from its own parts and those of its prefix; in one pass."""
    VALUE_BLOCK: tl.constexpr = padded_block(VALUE_DIM)
    in_group = tl.arange(0, JOIN_HEADS)
    dim = tl.arange(0, VALUE_BLOCK)
    acc = tl.zeros([JOIN_HEADS, VALUE_BLOCK], tl.float32)
    top = tl.full([JOIN_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([JOIN_HEADS], tl.float32)
    count = parts + prefix_parts
    for at in tl.range(0, count, JOIN_PARTS, num_stages=1):
        part = at + tl.arange(0, JOIN_PARTS)
        slot = tl.where(part < parts, first_slot + part, prefix_slot + part - parts)
        place = slot[:, None] * heads + first_head + in_group[None, :]
        known = (part < count)[:, None] & (in_group < GROUP)[None, :]
        # Other programs wrote these: not from this multiprocessor's own cache.
        tops = tl.load(stats + place * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + place * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial + place[:, :, None] * VALUE_DIM + dim[None, None, :],
            mask=known[:, :, None] & (dim < VALUE_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base[None, :])
        shrink = tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        top = new_top
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
