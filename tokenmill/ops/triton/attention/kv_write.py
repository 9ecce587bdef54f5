"""Heads of keys and values become codes and scales: the arithmetic of ops/kv_forms.py, bit for bit, inside a kernel.

A head is held as two halves, because int4 packs channel d and channel d + DIM / 2 into one byte.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.kv_forms import FP8 as FP8_FORM
from tokenmill.ops.kv_forms import INT4 as INT4_FORM
from tokenmill.ops.kv_forms import INT4_GROUP, LEAST_SCALE
from tokenmill.ops.kv_forms import INT8 as INT8_FORM
from tokenmill.ops.triton.attention.kv_expand import FP8, INT4, INT8

_GROUP = tl.constexpr(INT4_GROUP)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_INT8_MAX = tl.constexpr(INT8_FORM.largest)
_FP8_MAX = tl.constexpr(FP8_FORM.largest)
_INT4_MAX = tl.constexpr(INT4_FORM.largest)
_INF = tl.constexpr(float("inf"))
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no digits behind the point


@triton.constexpr_function
def _half_block(dim):
    return 1 << (dim // 2 - 1).bit_length()


@triton.jit
def half_range(DIM: tl.constexpr):
    """Half of DIM, as a power of two."""
    return tl.arange(0, _half_block(DIM))


@triton.jit
def load_half(source, FIRST: tl.constexpr, live, DIM: tl.constexpr):  # [HEADS, DIM / 2 as a power of two] float32
    dim = half_range(DIM)[None, :]
    return tl.load(source + FIRST + dim, mask=live[:, None] & (dim < DIM // 2), other=0.0).to(tl.float32)


@triton.jit
def store_codes(
    low,  # [HEADS, DIM / 2 as a power of two] float32
    high,
    codes,  # [HEADS, 1] pointers: where the heads' codes go
    scales,  # [heads of the cache, n]
    row,  # [HEADS]: which of those heads
    live,  # [HEADS] bool
    DIM: tl.constexpr,
    FORM: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    dim = half_range(DIM)[None, :]
    inside = live[:, None] & (dim < HALF)
    if FORM == INT4:
        SIZE: tl.constexpr = DIM if DIM < _GROUP else _GROUP
        GROUPS: tl.constexpr = DIM // SIZE
        twins = tl.zeros(low.shape, tl.int32)
        for group in tl.static_range(GROUPS):
            in_low = (dim < HALF) & (dim // SIZE == group)
            in_high = (dim < HALF) & ((HALF + dim) // SIZE == group)
            least = tl.minimum(_least(low, in_low), _least(high, in_high))
            least = -_rounded_up(-least)
            extent = tl.maximum(_largest(low, in_low), _largest(high, in_high)) - least
            scale = _scale(extent, _INT4_MAX)
            place = scales + row * (2 * GROUPS) + group
            tl.store(place, scale.to(tl.bfloat16), mask=live)
            tl.store(place + GROUPS, least.to(tl.bfloat16), mask=live)
            twins += tl.where(in_low, _int4(low, least, scale), 0)
            twins += tl.where(in_high, _int4(high, least, scale) * 16, 0)
        tl.store(codes + dim, twins.to(tl.uint8), mask=inside)
    else:
        everywhere = dim < HALF
        extent = tl.maximum(_largest(tl.abs(low), everywhere), _largest(tl.abs(high), everywhere))
        scale = _scale(extent, _INT8_MAX if FORM == INT8 else _FP8_MAX)
        tl.store(scales + row, scale.to(tl.bfloat16), mask=live)
        wide = tl.broadcast_to(scale[:, None], low.shape)
        if FORM == FP8:
            low = tl.clamp(tl.div_rn(low, wide), -_FP8_MAX, _FP8_MAX)
            high = tl.clamp(tl.div_rn(high, wide), -_FP8_MAX, _FP8_MAX)
        else:
            low = _rounded(tl.clamp(tl.div_rn(low, wide), -_INT8_MAX, _INT8_MAX))
            high = _rounded(tl.clamp(tl.div_rn(high, wide), -_INT8_MAX, _INT8_MAX))
        tl.store(codes + dim, low.to(codes.dtype.element_ty), mask=inside)
        tl.store(codes + HALF + dim, high.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _largest(x, where):  # [HEADS]
    """Infinite where something is not a number: no scale may hide it."""
    return tl.max(tl.where(where, tl.where(x == x, x, _INF), -_INF), 1)


@triton.jit
def _least(x, where):  # [HEADS]
    return tl.min(tl.where(where & (x == x), x, _INF), 1)


@triton.jit
def _int4(x, least, scale):
    wide = tl.broadcast_to(scale[:, None], x.shape)
    return tl.clamp(_rounded(tl.div_rn(x - least[:, None], wide)), 0.0, _INT4_MAX).to(tl.int32)


@triton.jit
def _rounded(x):
    """To the nearest whole number, halves to the even one; |x| is below 2**22."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def _scale(extent, largest):  # [HEADS] float32
    """The least bfloat16 that is not below extent / largest; one where there is nothing to scale."""
    scale = tl.div_rn(extent, tl.full(extent.shape, largest, tl.float32))
    return tl.where(scale < _LEAST_SCALE, 1.0, _rounded_up(scale))


@triton.jit
def _rounded_up(x):
    """The least bfloat16 that is not below x, of any sign, as float32. What is not finite stays so."""
    near = x.to(tl.bfloat16).to(tl.float32)
    step = tl.where(near >= 0.0, 1 << 16, -(1 << 16))  # towards larger numbers, in the order of the bits
    return tl.where(near < x, (near.to(tl.int32, bitcast=True) + step).to(tl.float32, bitcast=True), near)
