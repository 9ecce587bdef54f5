"""Decode over codes: keys and values are the left operands of products, and the few queries of a head the right ones.

A product of the hardware has sixteen rows on its left and eight columns on its right. Transposed so, four queries
leave few of them empty, and what is done per score (scales, softmax) is done for hardly any score that nobody needs.
So little is left to do that one warp is a program of its own, and waits for no other warp.
  - int8 and int4 keys are multiplied as the integers they are, and so are queries, of sixteen bits: 256 * high + low,
    side by side on the right. Sums are exact. The scales of int4's groups multiply the sums over their channels.
  - fp8 keys, int8 and fp8 values become float16, which holds every code; int4 values become numbers of
    the model's dtype with their scales.
    Two channels of a value are read as one number of sixteen bits, because the hardware turns matrices of these.
  - The scale of an int8 or fp8 value belongs to its weight, which could leave the range of float16; so the softmax is
    taken relative to the largest weight times scale, and only the total divides by the scale again.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.kv_forms import INT4_GROUP
from tokenmill.ops.triton.attention.kv_codes import load_scale, power_of_two_in, side_by_side
from tokenmill.ops.triton.attention.kv_expand import (
    FP8,
    INT4,
    INT8,
    expand_neighbours,
    expand_pairs,
    expand_pairs_of_halves,
    inverse,
    log2,
    split_halves,
    split_words,
)
from tokenmill.ops.triton.attention.paging import finite_or_zero, node_position, node_seen
from tokenmill.ops.triton.numeric import tanh

_GROUP = tl.constexpr(INT4_GROUP)
_MOST = tl.constexpr(127 * 256)  # of a query as an integer: its upper byte is 127 then


@triton.jit
def attend_transposed(
    q,  # the first query of the head
    stride_q_head,
    count,  # of queries
    k_cache,  # [heads, codes of DIM channels]
    v_cache,
    k_scales,  # [heads, n]
    v_scales,
    table,
    kv_head,
    begin,
    end,
    own,
    context,
    first,
    window,
    cap_scale,
    score_scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    FORM: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    tails=None,  # the query is a node of a tree: what it sees of that
    root=None,  # where that begins
    stands=None,  # its position
    FANOUT: tl.constexpr = 0,
):  # [QUERIES, DIM], [QUERIES], [QUERIES] float32
    """Tiles begin to end of a row: its values relative to the largest level, that level, and the total."""
    queries, sums, unit = _load_queries(q, stride_q_head, count, QUERIES, DIM, FORM)
    # Blocks of a tile, or the part of one block that is a tile.
    RUN: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    acc = ()
    for _ in tl.static_range(2 if FORM != INT4 else DIM // 16):
        acc += (tl.zeros([DIM // 2 if FORM != INT4 else 16, QUERIES], tl.float32),)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, QUERIES], tl.float32)
    for tile in range(begin, end):
        start = own + tile * BLOCK_N
        if WINDOWED:
            start = (tile + first) * BLOCK_N
        run = start + tl.arange(0, BLOCK_N // RUN) * RUN
        block = tl.load(table + run // BLOCK_SIZE, mask=run < context, other=0)
        slot = tl.arange(0, RUN)
        if BLOCK_SIZE > BLOCK_N:
            slot += start % BLOCK_SIZE
        # Heads of a layer number less than 2**31, their bytes do not.
        heads = (block * (BLOCK_SIZE * KV_HEADS) + kv_head.to(tl.int32))[:, None] + (slot * KV_HEADS)[None, :]
        heads = tl.reshape(heads, (BLOCK_N,))
        position = start + tl.arange(0, BLOCK_N)
        seen = position < context
        if FANOUT > 0:
            seen = seen & node_seen(tails, position, root)
            if WINDOWED:
                seen = seen & (node_position(position, root, FANOUT) > stands - window)
        elif WINDOWED:
            seen = seen & (position >= context - window)

        scores = _score(queries, sums, k_cache, k_scales, heads, DIM, FORM) * unit[None, :]
        if SOFTCAP:
            scores = tanh(scores * cap_scale)
        levels = scores * score_scale
        if FORM != INT4:
            v_scale = tl.where(seen, load_scale(v_scales, heads, None), 1.0)
            levels += log2(v_scale)[:, None]
        # What is not seen may be no number.
        levels = tl.where(seen[:, None], levels, float("-inf"))
        new_top = tl.maximum(top, tl.max(levels, 0))
        base = finite_or_zero(new_top)
        weights = tl.exp2(levels - base[None, :])
        shrink = tl.exp2(top - base)[None, :]
        top = new_top
        if FORM == INT4:
            total = total * shrink + weights
        else:
            total = total * shrink + weights * inverse(v_scale)[:, None]
        acc = _fold(acc, shrink, weights, v_cache, v_scales, heads, seen, q.dtype.element_ty, DIM, FORM)
    return _in_order(acc, FORM), top, tl.sum(total, 0)


@triton.jit
def _load_queries(
    q, stride, count, QUERIES: tl.constexpr, DIM: tl.constexpr, FORM: tl.constexpr
):  # right operands, for int4 the sums of their columns, and the unit of each query
    query = tl.arange(0, QUERIES)
    rows = q + (query * stride)[:, None]
    live = (query < count)[:, None]
    sums = ()
    if FORM == FP8:
        # Matrix i holds, of every eight channels, the two that come out of the keys' expansion together.
        column = tl.arange(0, DIM // 4)
        pointers = rows + (column // 2 * 8 + column % 2)[None, :]
        floats = ()
        most = tl.zeros([QUERIES], tl.float32)
        for i in tl.static_range(4):
            part = tl.load(pointers + 2 * i, mask=live, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.abs(part), 1))
            floats += (part,)
        # A power of two, so that nothing is rounded: float16 has more digits than bfloat16, but less range.
        unit = power_of_two_in(most)
        queries = ()
        for i in tl.static_range(4):
            queries += (tl.trans((floats[i] / unit[:, None]).to(tl.float16)),)
        return queries, sums, unit
    else:
        STEP: tl.constexpr = DIM if FORM == INT8 else _GROUP
        most = tl.zeros([QUERIES], tl.float32)
        byte = tl.arange(0, 2 * QUERIES)
        byte_most = tl.zeros([2 * QUERIES], tl.float32)
        byte_rows = q + (byte // 2 * stride)[:, None]
        byte_live = (byte // 2 < count)[:, None]
        channel = tl.arange(0, STEP)[None, :]
        for at in tl.static_range(0, DIM, STEP):
            part = tl.load(rows + at + channel, mask=live, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.abs(part), 1))
            part = tl.load(byte_rows + at + channel, mask=byte_live, other=0.0).to(tl.float32)
            byte_most = tl.maximum(byte_most, tl.max(tl.abs(part), 1))
        unit = _unit(most)
        queries = ()
        for at in tl.static_range(0, DIM, STEP):
            part = tl.load(byte_rows + at + channel, mask=byte_live, other=0.0).to(tl.float32)
            number = _rounded(part / _unit(byte_most)[:, None])
            high = (number + 128) >> 8
            halves = tl.where((byte % 2 == 0)[:, None], high, number - high * 256)
            queries += (tl.trans(halves.to(tl.int8)),)
            if FORM == INT4:
                part = tl.load(rows + at + channel, mask=live, other=0.0).to(tl.float32)
                sums += (tl.sum(_rounded(part / unit[:, None]), 1).to(tl.float32),)
        return queries, sums, unit


@triton.jit
def _unit(most):
    return tl.where(most == 0.0, 1.0, most / _MOST)


@triton.jit
def _rounded(x):
    return tl.floor(x + 0.5).to(tl.int32)


@triton.jit
def _score(queries, sums, k_cache, k_scales, heads, DIM: tl.constexpr, FORM: tl.constexpr):  # [n, QUERIES]
    far = heads.to(tl.int64)[:, None]
    if FORM == FP8:
        word = tl.arange(0, DIM // 4)
        keys = expand_neighbours(tl.load(_as(k_cache, tl.int32) + far * (DIM // 4) + word[None, :]))
        scores = tl.dot(keys[0], queries[0])
        for i in tl.static_range(1, 4):
            scores = tl.dot(keys[i], queries[i], scores)
        return scores * load_scale(k_scales, heads, None)[:, None]
    elif FORM == INT8:
        keys = tl.load(_as(k_cache, tl.int8) + far * DIM + tl.arange(0, DIM)[None, :])
        return _product(keys, queries[0]) * load_scale(k_scales, heads, None)[:, None]
    else:
        HALVES: tl.constexpr = DIM // 2 // _GROUP
        numbers = _load_group_scales(k_scales, heads, None, 2 * HALVES, tl.float32)
        scores = tl.zeros([heads.shape[0], queries[0].shape[1] // 2], tl.float32)
        for i in tl.static_range(HALVES):
            byte = i * _GROUP + tl.arange(0, _GROUP)
            low, high = split_halves(tl.load(_as(k_cache, tl.int8) + far * (DIM // 2) + byte[None, :]))
            scores += _product(low, queries[i]) * numbers[i][:, None]
            scores += numbers[2 * HALVES + i][:, None] * sums[i][None, :]
            scores += _product(high, queries[HALVES + i]) * numbers[HALVES + i][:, None]
            scores += numbers[3 * HALVES + i][:, None] * sums[HALVES + i][None, :]
        return scores


@triton.jit
def _product(codes, query):  # [n, QUERIES]
    both = tl.dot(codes, query)
    high, low = tl.split(tl.reshape(both, (both.shape[0], both.shape[1] // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def _fold(
    acc,
    shrink,
    weights,  # [n, QUERIES]
    v_cache,
    v_scales,
    heads,
    seen,
    kind: tl.constexpr,  # of int4's values
    DIM: tl.constexpr,
    FORM: tl.constexpr,
):
    """The values of these heads added, times their weights; what was there before, times shrink."""
    far = heads.to(tl.int64)[None, :]
    pairs = _as(v_cache, tl.int16)
    new = ()
    if FORM == INT4:
        HALVES: tl.constexpr = DIM // 2 // _GROUP
        narrow = weights.to(kind)
        numbers = _load_group_scales(v_scales, heads, seen, 2 * HALVES, tl.bfloat16)
        for i in tl.static_range(HALVES):
            pair = i * (_GROUP // 2) + tl.arange(0, _GROUP // 2)
            parts = expand_pairs_of_halves(
                tl.load(pairs + far * (DIM // 4) + pair[:, None]),
                _across(numbers[i]), _across(numbers[2 * HALVES + i]),
                _across(numbers[HALVES + i]), _across(numbers[3 * HALVES + i]), kind,
            )  # fmt: skip
            for k in tl.static_range(4):
                new += (tl.dot(parts[k], narrow, acc[4 * i + k] * shrink),)
    else:
        narrow = weights.to(tl.float16)
        pointers = pairs + far * (DIM // 2) + tl.arange(0, DIM // 2)[:, None]
        # Bytes of fp8 may be no number.
        codes = tl.load(pointers, mask=seen[None, :], other=0) if FORM == FP8 else tl.load(pointers)
        parts = expand_pairs(codes, FORM)
        for k in tl.static_range(2):
            new += (tl.dot(parts[k], narrow, acc[k] * shrink),)
    return new


@triton.jit
def _across(number):  # [n] -> [16, n] bfloat16
    return tl.broadcast_to(number[None, :], (16, number.shape[0]))


@triton.jit
def _in_order(acc, FORM: tl.constexpr):  # [QUERIES, DIM]
    """The sums of values, whose rows are every second channel, or every second of half a group pair."""
    if FORM != INT4:
        return tl.interleave(tl.trans(acc[0]), tl.trans(acc[1]))
    else:
        lows = ()
        highs = ()
        for i in tl.static_range(0, len(acc), 4):
            lows += (tl.interleave(tl.trans(acc[i]), tl.trans(acc[i + 2])),)
            highs += (tl.interleave(tl.trans(acc[i + 1]), tl.trans(acc[i + 3])),)
        return side_by_side(lows + highs)


@triton.jit
def _as(pointer, kind: tl.constexpr):
    return pointer.to(tl.pointer_type(kind))


@triton.jit
def _load_group_scales(scales, heads, seen, GROUPS: tl.constexpr, kind: tl.constexpr):  # 2 * GROUPS of [n]
    """The scales of a head's groups, then their minima: read as one piece."""
    pointers = _as(scales, tl.int32) + heads.to(tl.int64)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    words = tl.load(pointers) if seen is None else tl.load(pointers, mask=seen[:, None], other=0)
    numbers = ()
    for i in tl.static_range(GROUPS):
        pair = _column(words, i, GROUPS)
        if kind == tl.float32:
            numbers += ((pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True))
        else:
            numbers += split_words(pair)
    return numbers


@triton.jit
def _column(matrix, NUMBER: tl.constexpr, WIDTH: tl.constexpr):  # [n, WIDTH] -> [n]
    if WIDTH == 1:
        return tl.reshape(matrix, (matrix.shape[0],))
    else:
        left, right = tl.split(tl.reshape(matrix, (matrix.shape[0], WIDTH // 2, 2)))
        return _column(left if NUMBER % 2 == 0 else right, NUMBER // 2, WIDTH // 2)
