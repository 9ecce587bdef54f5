"""Quantized keys and values inside kernels: codes are written with their scales, and read four bytes at a time.

Reading. A 32-bit word holds one byte of each of four channels, and a product over all channels does not care for their
order: byte i of all words of a head is a matrix of its own, and four small products (eight with two codes in a byte)
take the place of a large one. So no code ever moves from one thread to another, and a pair of words becomes pairs of
float16 in a few instructions, whatever way the product wants them: along a key's channels, or across keys.
  - int8, fp8: products are of float16, which holds every code. The scale of a key multiplies its scores. The scale of a
    value belongs to its weight, which could leave the range of float16; so the softmax is taken relative to the largest
    weight times scale, and only the total divides by the scale again.
  - int4: codes become numbers of the model's dtype, because scales and minima differ from group to group of a head.
A cache of codes is contiguous; offsets count heads (of a token), which number both their codes and their scales.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.ops.kv_forms import INT4_GROUP, KVScales, channels, form_of
from tokenmill.ops.triton.attention.kv_expand import FP8, INT4, INT8, expand, expand_halves
from tokenmill.ops.triton.attention.paging import (
    finite_or_zero,
    first_block,
    fold,
    load_rows,
    padded_block,
    rest_block,
    score,
)
from tokenmill.ops.triton.numeric import tanh

FLOATS = tl.constexpr(0)
FORMS = {"int8": INT8.value, "fp8": FP8.value, "int4": INT4.value}
_GROUP = tl.constexpr(INT4_GROUP)


class Cache(NamedTuple):
    """A layer's cache as kernels take it: tensors, strides in their elements, and what is compiled in."""

    tensors: tuple[torch.Tensor, ...]  # keys, values, their scales (anything where there are none)
    strides: tuple[int, ...]  # of keys, then of values: block, token, head; of codes: in heads
    constants: dict[str, int]


def cache_arguments(k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScales | None) -> Cache:
    key_dim, value_dim, block_size = channels(k_cache), channels(v_cache), k_cache.shape[1]
    constants = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "BLOCK_SIZE": block_size}
    if scales is None:
        strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
        constants |= {"SAME_LAYOUT": strides[:3] == strides[3:], "FORM": FLOATS.value}
        return Cache((k_cache, v_cache, k_cache, v_cache), strides, constants)
    form = FORMS[form_of(k_cache).name]
    tensors = (k_cache, v_cache, scales.k, scales.v)
    assert all(tensor.is_contiguous() for tensor in tensors)
    if form != INT4.value:
        assert key_dim % 4 == value_dim % 4 == 0, "codes of one byte are read in words of four"
        tensors = (k_cache.view(torch.int32), v_cache.view(torch.int32), scales.k, scales.v)
    constants |= {"SAME_LAYOUT": True, "FORM": form}
    return Cache(tensors, (block_size * k_cache.shape[2], k_cache.shape[2], 1) * 2, constants)


@triton.jit
def load_queries(
    q,
    offsets,  # [BLOCK_M]
    live,  # [BLOCK_M] bool
    KEY_DIM: tl.constexpr,
    FORM: tl.constexpr,
):  # tuple of matrices with BLOCK_M rows, and [BLOCK_M] float32 that belongs to them
    """Queries as the keys of this form want them, and the factor that was taken out of each."""
    unit = tl.full(live.shape, 1.0, tl.float32)
    if FORM == FLOATS:
        FIRST: tl.constexpr = first_block(KEY_DIM)
        REST: tl.constexpr = rest_block(KEY_DIM)
        first = load_rows(q, offsets, live, KEY_DIM if KEY_DIM < FIRST else FIRST, FIRST)
        rest = first
        if REST > 0:
            rest = load_rows(q + FIRST, offsets, live, KEY_DIM - FIRST, REST)
        return (first, rest), unit
    elif FORM == INT4:
        HALF: tl.constexpr = KEY_DIM // 2
        STEP: tl.constexpr = _step(KEY_DIM)
        WIDTH: tl.constexpr = HALF if HALF < STEP else STEP
        queries = ()
        for half in tl.static_range(2):
            for at in tl.static_range(0, HALF, STEP):
                queries += (load_rows(q + half * HALF + at, offsets, live, WIDTH, STEP),)
        return queries, unit
    else:
        word = tl.arange(0, padded_block(KEY_DIM // 4))
        pointers = q + offsets[:, None] + 4 * word[None, :]
        inside = live[:, None] & (word < KEY_DIM // 4)[None, :]
        queries = ()
        for i in tl.static_range(4):
            queries += (tl.load(pointers + i, mask=inside, other=0.0),)
        if q.dtype.element_ty != tl.float32:
            queries, unit = _small(queries, unit)
        return queries, unit


@triton.constexpr_function
def _step(dim):
    """Bytes of int4 codes that are read together: all their lower halves are of one group, and all their upper ones."""
    return INT4_GROUP if dim // 2 % INT4_GROUP == 0 else 16


@triton.constexpr_function
def _parts(dim, form):
    """Matrices that a head is read as."""
    return 2 * -(-dim // 2 // _step(dim)) if form == INT4.value else 4


@triton.jit
def _small(queries, unit):
    """Queries in float16, and the power of two that was taken out of each, so that nothing is rounded: float16 has more
    digits than bfloat16, but less range.
    """
    top = tl.zeros_like(unit)
    for i in tl.static_range(4):
        top = tl.maximum(top, tl.max(tl.abs(queries[i].to(tl.float32)), 1))
    unit = power_of_two_in(top)
    small = ()
    for i in tl.static_range(4):
        small += ((queries[i].to(tl.float32) / unit[:, None]).to(tl.float16),)
    return small, unit


@triton.jit
def power_of_two_in(top):
    """The largest power of two that is not above `top`; one where it is zero."""
    bits = top.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def score_keys(
    queries,  # of load_queries
    unit,  # [BLOCK_M]
    k_head,  # of cached_head
    k_scales,
    offsets,  # [BLOCK_N]
    seen,  # [BLOCK_N] bool
    cap_scale,
    KEY_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FORM: tl.constexpr,
):  # [BLOCK_M, BLOCK_N] float32
    if FORM == FLOATS:
        return score(queries[0], queries[1], k_head, offsets, seen, cap_scale, KEY_DIM, SOFTCAP)
    else:
        keys = _load_codes(k_head, k_scales, offsets, seen, KEY_DIM, queries[0].dtype, FORM)
        scores = tl.dot(queries[0], tl.trans(keys[0]), input_precision="ieee")
        for i in tl.static_range(1, _parts(KEY_DIM, FORM)):
            scores = tl.dot(queries[i], tl.trans(keys[i]), scores, input_precision="ieee")
        if FORM != INT4:
            scores = scores * load_scale(k_scales, offsets, seen)[None, :] * unit[:, None]
        if SOFTCAP:
            scores = tanh(scores * cap_scale)
        return scores


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, VALUE_DIM: tl.constexpr, FORM: tl.constexpr):
    """The sum of no values as fold_values takes it, the largest of no scores, and their total."""
    if FORM == FLOATS:
        acc = (tl.zeros([BLOCK_M, padded_block(VALUE_DIM)], tl.float32),)
    else:
        WIDTH: tl.constexpr = _step(VALUE_DIM) if FORM == INT4 else padded_block(VALUE_DIM // 4)
        acc = ()
        for _ in tl.static_range(_parts(VALUE_DIM, FORM)):
            acc += (tl.zeros([BLOCK_M, WIDTH], tl.float32),)
    return acc, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def fold_values(
    acc,  # of nothing_seen
    top,  # [BLOCK_M]
    total,  # [BLOCK_M]
    scores,  # [BLOCK_M, BLOCK_N]
    v_head,  # of cached_head
    v_scales,
    offsets,  # [BLOCK_N]
    seen,  # [BLOCK_N] bool
    scale,
    kind,  # of the products' operands: that of load_queries
    VALUE_DIM: tl.constexpr,
    FORM: tl.constexpr,
):
    """One step of the online softmax: acc and total are relative to top, the largest score so far."""
    if FORM == FLOATS:
        values = load_rows(v_head, offsets, seen, VALUE_DIM, padded_block(VALUE_DIM)).to(kind)
        new, top, total = fold(acc[0], top, total, scores, values, scale)
        return (new,), top, total
    else:
        values = _load_codes(v_head, v_scales, offsets, seen, VALUE_DIM, kind, FORM)
        levels = scores * scale
        if FORM != INT4:
            value_scale = tl.where(seen, load_scale(v_scales, offsets, seen), 1.0)
            levels += tl.log2(value_scale)[None, :]
        new_top = tl.maximum(top, tl.max(levels, 1))
        base = finite_or_zero(new_top)
        weights = tl.exp2(levels - base[:, None])
        shrink = tl.exp2(top - base)
        narrow = weights.to(kind)
        new = ()
        for i in tl.static_range(_parts(VALUE_DIM, FORM)):
            new += (tl.dot(narrow, values[i], acc[i] * shrink[:, None], input_precision="ieee"),)
        if FORM != INT4:
            weights = weights * (1.0 / value_scale)[None, :]
        return new, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def value_channels(VALUE_DIM: tl.constexpr, FORM: tl.constexpr):
    """The channel of each column of whole_values; VALUE_DIM or more, and each once, where there is none."""
    if FORM == FLOATS:
        return tl.arange(0, padded_block(VALUE_DIM))
    elif FORM == INT4:
        STEP: tl.constexpr = _step(VALUE_DIM)
        HALF: tl.constexpr = VALUE_DIM // 2
        column = tl.arange(0, STEP * _next_power(_parts(VALUE_DIM, FORM)))
        if HALF >= STEP:
            return column
        else:
            return tl.where(column % STEP < HALF, column % STEP + column // STEP * HALF, column + VALUE_DIM)
    else:
        return tl.arange(0, 4 * padded_block(VALUE_DIM // 4))


@triton.constexpr_function
def _next_power(n):
    return 1 << (n - 1).bit_length()


@triton.jit
def whole_values(acc, FORM: tl.constexpr):
    """A sum of values as one matrix."""
    if FORM == FLOATS:
        return acc[0]
    elif FORM == INT4:
        return side_by_side(acc)
    else:
        return tl.interleave(tl.interleave(acc[0], acc[2]), tl.interleave(acc[1], acc[3]))


@triton.jit
def side_by_side(parts):
    """Matrices of the same shape as one, two by two; zeros stand in for a missing one."""
    for _ in tl.static_range((len(parts) - 1).bit_length()):
        wider = ()
        for i in tl.static_range(0, len(parts), 2):
            right = parts[i + 1] if i + 1 < len(parts) else tl.zeros_like(parts[i])
            both = tl.permute(tl.join(parts[i], right), (0, 2, 1))
            wider += (tl.reshape(both, (right.shape[0], 2 * right.shape[1])),)
        parts = wider
    return parts[0]


@triton.jit
def load_decoded(
    codes, scales, offsets, seen, DIM: tl.constexpr, FORM: tl.constexpr
):  # [n, DIM or some more] float32, and the channel of each column
    """What the codes of these heads stand for; zeros where not seen, and in columns without a channel."""
    values = whole_values(_load_codes(codes, scales, offsets, seen, DIM, tl.float32, FORM), FORM)
    channel = value_channels(DIM, FORM)
    if FORM != INT4:
        return values * load_scale(scales, offsets, seen)[:, None], channel
    else:
        return tl.where((channel < DIM)[None, :], values, 0.0), channel


@triton.jit
def load_scale(scales, offsets, seen):  # [n] float32; zero where not seen; None: all are
    """In whole words, because smaller ones cannot be copied ahead of time."""
    words = scales.to(tl.pointer_type(tl.int32)) + (offsets >> 1)
    word = tl.load(words) if seen is None else tl.load(words, mask=seen, other=0)
    return ((word >> ((offsets & 1) << 4).to(tl.int32)) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _load_codes(
    codes,  # [heads, DIM / 4] int32, or [heads, DIM / 2] of bytes
    scales,
    offsets,  # [n]
    seen,  # [n] bool
    DIM: tl.constexpr,
    kind,
    FORM: tl.constexpr,
):  # matrices with n rows: what is not seen is zero
    """Codes of one byte stay numbers without a scale, in float16 or float32."""
    if FORM == INT4:
        STEP: tl.constexpr = _step(DIM)
        HALF: tl.constexpr = DIM // 2
        WIDTH: tl.constexpr = HALF if HALF < STEP else STEP
        SIZE: tl.constexpr = DIM if DIM < _GROUP else _GROUP
        GROUPS: tl.constexpr = DIM // SIZE
        pointers = scales.to(tl.pointer_type(tl.int32)) + offsets * GROUPS
        pairs = ()
        for i in tl.static_range(GROUPS):
            pairs += (tl.load(pointers + i, mask=seen, other=0),)
        lows = ()
        highs = ()
        for at in tl.static_range(0, HALF, STEP):
            twins = load_rows(codes + at, offsets * HALF, seen, WIDTH, STEP)
            low, high = expand_halves(
                twins,
                _of_group(pairs, at // SIZE, STEP), _of_group(pairs, GROUPS + at // SIZE, STEP),
                _of_group(pairs, (HALF + at) // SIZE, STEP), _of_group(pairs, GROUPS + (HALF + at) // SIZE, STEP),
                kind,
            )  # fmt: skip
            lows += (low,)
            highs += (high,)
        return lows + highs
    else:
        return expand(load_rows(codes, offsets * (DIM // 4), seen, DIM // 4, padded_block(DIM // 4)), kind, FORM)


@triton.jit
def _of_group(pairs, NUMBER: tl.constexpr, WIDTH: tl.constexpr):  # [n, WIDTH] bfloat16
    """The scale or minimum with this number, out of the pairs of them that stand beside a head."""
    pair = pairs[NUMBER // 2]
    half = (pair if NUMBER % 2 == 0 else pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.broadcast_to(half[:, None], (pair.shape[0], WIDTH))
