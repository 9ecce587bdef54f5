"""Decode over codes: keys and values are the left operands of products, whose right ones are the few queries of a head.

A product takes sixteen rows on its left and eight on its right: four queries fill half of the right side, but a quarter
of the left one. A program is a single warp, so nothing waits for other warps.
  - int8 and int4 keys are multiplied as they are, with queries of sixteen bits: a query is 256 * high + low, and both
    stand beside each other on the right. The sum of integers is exact.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.kv_expand import FP8, INT8, expand

_MOST = tl.constexpr(32512)  # 127 * 256: of an integer whose upper byte is at most 127 when rounded


@triton.jit
def attend_codes(
    q,
    q_offsets,  # [QUERIES]
    live,  # [QUERIES] bool
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    kv_head,
    begin,
    end,
    own,
    context,
    first,
    sink_tiles,
    window,
    sinks,
    cap_scale,
    score_scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    FORM: tl.constexpr,
    PTX: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    WORDS: tl.constexpr = DIM // 4
    dim = tl.arange(0, DIM)
    whole = tl.load(q + q_offsets[:, None] + dim[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    right, unit = _integers(whole)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, QUERIES], tl.float32)
    a0 = tl.zeros([WORDS, QUERIES], tl.float32)
    a1 = a0
    a2 = a0
    a3 = a0
    factor = unit * score_scale
    word = tl.arange(0, WORDS)
    keys8 = k_cache.to(tl.pointer_type(tl.int8))
    BLOCKS: tl.constexpr = BLOCK_N // BLOCK_SIZE
    for tile in range(begin, end):
        start = own + tile * BLOCK_N
        if WINDOWED:
            start = tl.where(tile < sink_tiles, tile, tile - sink_tiles + first) * BLOCK_N
        number = start // BLOCK_SIZE + tl.arange(0, BLOCKS)
        block = tl.load(table + number, mask=number * BLOCK_SIZE < context, other=0).to(tl.int64)
        slot = tl.arange(0, BLOCK_SIZE)
        heads = (block * (BLOCK_SIZE * KV_HEADS) + kv_head)[:, None] + (slot * KV_HEADS)[None, :]
        offsets = tl.reshape(heads, (BLOCK_N,))
        position = start + tl.arange(0, BLOCK_N)
        seen = position < context
        if WINDOWED:
            seen = seen & ((position >= context - window) | (position < sinks))
        keys = tl.load(keys8 + offsets[:, None] * DIM + dim[None, :])
        both = tl.dot(keys, right)
        high, low = tl.split(tl.reshape(both, (BLOCK_N, QUERIES, 2)))
        scores = (high * 256 + low).to(tl.float32)
        k_scale = _load_scale(k_scales, offsets)
        v_scale = _load_scale(v_scales, offsets)
        v_scale = tl.where(seen, v_scale, 1.0)
        levels = scores * k_scale[:, None] * factor[None, :] + _log2(v_scale, PTX)[:, None]
        levels = tl.where(seen[:, None], levels, float("-inf"))
        new_top = tl.maximum(top, tl.max(levels, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(levels - base[None, :])
        shrink = tl.exp2(top - base)
        top = new_top
        total = total * shrink[None, :] + weights * _inverse(v_scale, PTX)[:, None]
        narrow = weights.to(tl.float16)
        words = tl.load(v_cache + offsets[None, :] * WORDS + word[:, None])
        v0, v1, v2, v3 = expand(words, tl.float16, FORM, PTX)
        a0 = tl.dot(v0, narrow, a0 * shrink[None, :])
        a1 = tl.dot(v1, narrow, a1 * shrink[None, :])
        a2 = tl.dot(v2, narrow, a2 * shrink[None, :])
        a3 = tl.dot(v3, narrow, a3 * shrink[None, :])
    acc = tl.interleave(tl.interleave(tl.trans(a0), tl.trans(a2)), tl.interleave(tl.trans(a1), tl.trans(a3)))
    return acc, top, tl.sum(total, 0)


@triton.jit
def _integers(x):  # [rows, n] float32 -> [n, 2 * rows] int8: upper and lower bytes side by side, and [rows] the unit
    most = tl.max(tl.abs(x), 1)
    unit = tl.where(most == 0.0, 1.0, most / _MOST)
    number = _rounded(x / unit[:, None])
    high = (number + 128) >> 8
    both = tl.permute(tl.join(high, number - high * 256).to(tl.int8), (0, 2, 1))
    return tl.trans(tl.reshape(both, (2 * x.shape[0], x.shape[1]))), unit


@triton.jit
def _rounded(x):
    return tl.floor(x + 0.5).to(tl.int32)


@triton.jit
def _load_scale(scales, offsets):  # [n] float32
    words = scales.to(tl.pointer_type(tl.int32))
    word = tl.load(words + (offsets >> 1))
    return ((word >> ((offsets & 1) << 4).to(tl.int32)) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _log2(x, PTX: tl.constexpr):
    """Of normal numbers, as all scales are."""
    if PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _inverse(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x
