"""Decode over codes: keys and values are the left operands of products, whose right ones are the few queries of a head.

A product takes sixteen rows on its left and eight on its right: four queries fill half of the right side, but a quarter
of the left one. A program is a single warp, so nothing waits for other warps.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.ops.triton.kv_expand import FP8, INT8, expand

INT4 = tl.constexpr(3)
_MOST = tl.constexpr(32512)  # 127 * 256: an integer whose upper byte is at most 127 when rounded


@triton.jit
def attend_codes(
    q,
    first_head,  # offset of the first query
    stride_q_head,
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
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    FORM: tl.constexpr,
    PTX: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    V_INT: tl.constexpr,
):
    WORDS: tl.constexpr = DIM // 4
    dim = tl.arange(0, DIM)
    word = tl.arange(0, WORDS)
    query = tl.arange(0, QUERIES)
    if FORM == INT8:
        whole = tl.load(q + (query * stride_q_head)[:, None] + dim[None, :], mask=(query < GROUP)[:, None], other=0.0)
        unit = _unit(tl.max(tl.abs(whole.to(tl.float32)), 1))
        byte = tl.arange(0, 2 * QUERIES)
        q2 = tl.load(q + (byte // 2 * stride_q_head)[:, None] + dim[None, :], mask=(byte < 2 * GROUP)[:, None], other=0.0).to(tl.float32)
        q_int = _rounded(q2 / _unit(tl.max(tl.abs(q2), 1))[:, None])
        q_high = (q_int + 128) >> 8
        right = tl.trans(tl.where((byte % 2 == 0)[:, None], q_high, q_int - q_high * 256).to(tl.int8))
        rights = (right,)
    else:
        w4 = 8 * (word // 2) + word % 2
        parts = ()
        for i in tl.static_range(4):
            parts += (tl.load(q + (query * stride_q_head)[:, None] + (w4 + 2 * i)[None, :], mask=(query < GROUP)[:, None], other=0.0).to(tl.float32),)
        most = tl.max(tl.abs(parts[0]), 1)
        for i in tl.static_range(1, 4):
            most = tl.maximum(most, tl.max(tl.abs(parts[i]), 1))
        bits = most.to(tl.int32, bitcast=True) & 0x7F800000
        unit = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
        rights = ()
        for i in tl.static_range(4):
            rights += (tl.trans((parts[i] / unit[:, None]).to(tl.float16)),)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, QUERIES], tl.float32)
    acc = ()
    for _ in tl.static_range(4):
        acc += (tl.zeros([WORDS, QUERIES], tl.float32),)
    factor = unit * score_scale
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
        if FORM == INT8:
            keys = tl.load(keys8 + offsets[:, None] * DIM + dim[None, :])
            k_high, k_low = tl.split(tl.reshape(tl.dot(keys, rights[0]), (BLOCK_N, QUERIES, 2)))
            scores = (k_high * 256 + k_low).to(tl.float32)
        else:
            kw = tl.load(k_cache + offsets[:, None] * WORDS + word[None, :])
            k4 = _spread_fp8(kw)
            scores = tl.dot(k4[0], rights[0])
            for i in tl.static_range(1, 4):
                scores = tl.dot(k4[i], rights[i], scores)
        k_scale = _load_scale(k_scales, offsets)
        v_scale = _load_scale(v_scales, offsets)
        v_scale = tl.where(seen, v_scale, 1.0)
        levels = scores * k_scale[:, None] * factor[None, :] + _log2(v_scale, PTX)[:, None]
        levels = tl.where(seen[:, None], levels, float("-inf"))
        words = tl.load(v_cache + offsets[None, :] * WORDS + word[:, None])
        if V_INT:
            tile_top = tl.max(levels, 0)
            tile_base = tl.where(tile_top == float("-inf"), 0.0, tile_top)
            weights = tl.exp2(levels - tile_base[None, :])
            new_top = tl.maximum(top, tile_top)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink = tl.exp2(top - base)
            grow = tl.exp2(tile_base - base)
            top = new_top
            total = total * shrink[None, :] + weights * _inverse(v_scale, PTX)[:, None] * grow[None, :]
            p = _rounded(weights * 32512.0)
            p_high = (p + 128) >> 8
            p8 = tl.reshape(tl.join(p_high, p - p_high * 256).to(tl.int8), (BLOCK_N, 2 * QUERIES))
            v4 = _bytes4(words)
            new = ()
            for i in tl.static_range(4):
                v_high, v_low = tl.split(tl.reshape(tl.dot(v4[i], p8), (WORDS, QUERIES, 2)))
                new += (acc[i] * shrink[None, :] + (v_high * 256 + v_low).to(tl.float32) * grow[None, :],)
            acc = new
        else:
            new_top = tl.maximum(top, tl.max(levels, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(levels - base[None, :])
            shrink = tl.exp2(top - base)
            top = new_top
            total = total * shrink[None, :] + weights * _inverse(v_scale, PTX)[:, None]
            narrow = weights.to(tl.float16)
            v4 = expand(words, tl.float16, FORM, PTX)
            new = ()
            for i in tl.static_range(4):
                new += (tl.dot(v4[i], narrow, acc[i] * shrink[None, :]),)
            acc = new
    out = tl.interleave(tl.interleave(tl.trans(acc[0]), tl.trans(acc[2])), tl.interleave(tl.trans(acc[1]), tl.trans(acc[3])))
    return out, top, tl.sum(total, 0)


@triton.jit
def _bytes4(words):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $6, $7, 0x5140;
        prmt.b32 c, $4, $5, 0x7362;
        prmt.b32 d, $6, $7, 0x7362;
        prmt.b32 $0, a, b, 0x5410;
        prmt.b32 $1, a, b, 0x7632;
        prmt.b32 $2, c, d, 0x5410;
        prmt.b32 $3, c, d, 0x7632;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r", [words], (tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _spread_fp8(words):
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, c, d;
        mov.b32 {a, b}, $4;
        mov.b32 {c, d}, $5;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }""",
        "=r,=r,=r,=r,r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _unit(most):
    return tl.where(most == 0.0, 1.0, most / _MOST)


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
