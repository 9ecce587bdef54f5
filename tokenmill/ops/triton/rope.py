"""Head norms, rotary embedding and the KV write in one kernel: q in place, k and v into the cache, perhaps as codes."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import FLOAT8
from tokenmill.ops.kv_forms import KVScales, form_of
from tokenmill.ops.triton.attention.kv_codes import FORMS
from tokenmill.ops.triton.attention.kv_write import half_range, load_half, store_codes
from tokenmill.ops.triton.config import MAX_HEAD_DIM, declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, prefetch_constants, quick_launch, start_next, wait_for_previous


def rope_kv_write(
    q: torch.Tensor,  # [tokens, heads, dim], rotated in place
    k: torch.Tensor,  # [tokens, kv_heads, dim]
    v: torch.Tensor | None,  # [tokens, kv_heads, v_dim]; None where values are a view of the keys (MLA)
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32: cosines, then sines, of each rotation
    positions: torch.Tensor,  # [tokens]
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    v_cache: torch.Tensor | None,  # [blocks, block_size, kv_heads, v_dim]
    slots: torch.Tensor,  # [tokens]: block * block_size + offset; negative: do not write
    q_norm: torch.Tensor | None = None,  # [dim]: heads of q and k are normed before they are rotated
    k_norm: torch.Tensor | None = None,  # [dim]: both or neither
    eps: float = 0.0,
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> None:
    tokens, heads, dim = q.shape
    kv_heads, rotated = k.shape[1], cos_sin.shape[1]
    values, value_cache = (v, v_cache) if v is not None and v_cache is not None else (k, k_cache)
    value_dim = v.shape[2] if v is not None else 0
    k_scales, v_scales = (k_cache, value_cache) if scales is None else (scales.k, scales.v)
    assert scales is None or (dim % 2 == value_dim % 2 == 0 and k_scales.is_contiguous() and v_scales.is_contiguous())
    # About 2k elements per program, whatever the head size.
    heads_each = max(1, min(power_of_two(max(heads, kv_heads)), 2048 // power_of_two(max(dim, value_dim))))
    q_programs = ceil_div(heads, heads_each)
    _rope_kernel[(tokens, q_programs + ceil_div(kv_heads, heads_each))](
        q, k, values, cos_sin, positions, k_cache, value_cache, k_scales, v_scales, slots,
        cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm, eps,
        *q.stride()[:2], *k.stride()[:2], *values.stride()[:2], cos_sin.stride(0),
        *k_cache.stride()[:3], *value_cache.stride()[:3], heads, kv_heads, q_programs,
        HALF=rotated // 2, HALF_BLOCK=power_of_two(rotated // 2), DIM=dim, TAIL_BLOCK=power_of_two(dim - rotated),
        VALUE_DIM=value_dim, VALUE_BLOCK=power_of_two(value_dim), BLOCK_SIZE=k_cache.shape[1], HEADS=heads_each,
        NORM=q_norm is not None, FORM=0 if scales is None else FORMS[form_of(k_cache).name], num_warps=4,
    )  # fmt: skip


def rope(
    q: torch.Tensor,  # [tokens, heads, dim], rotated in place
    cos_sin: torch.Tensor,  # [max_positions, rot_dim] float32
    positions: torch.Tensor,  # [tokens]
) -> None:
    """The same kernel without the programs that would write keys and values."""
    tokens, heads, dim = q.shape
    rotated = cos_sin.shape[1]
    heads_each = max(1, min(power_of_two(heads), 2048 // power_of_two(dim)))
    q_programs = ceil_div(heads, heads_each)
    _rope_kernel[(tokens, q_programs)](
        q, q, q, cos_sin, positions, q, q, q, q, positions, cos_sin, cos_sin, 0.0,
        *q.stride()[:2], *q.stride()[:2], *q.stride()[:2], cos_sin.stride(0), *[0] * 6, heads, 0, q_programs,
        HALF=rotated // 2, HALF_BLOCK=power_of_two(rotated // 2), DIM=dim, TAIL_BLOCK=power_of_two(dim - rotated),
        VALUE_DIM=0, VALUE_BLOCK=1, BLOCK_SIZE=1, HEADS=heads_each, NORM=False, FORM=0, num_warps=4,
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # slices of a packed buffer
def _rope_kernel(
    q,  # [tokens, heads, DIM]
    k,  # [tokens, kv_heads, DIM]
    v,  # [tokens, kv_heads, VALUE_DIM]
    cos_sin,  # [max_positions, 2 * HALF]
    positions,  # [tokens]
    k_cache,  # [blocks, BLOCK_SIZE, kv_heads, DIM]
    v_cache,  # [blocks, BLOCK_SIZE, kv_heads, VALUE_DIM]
    k_scales,  # [blocks, BLOCK_SIZE, kv_heads, n], where the cache holds codes
    v_scales,
    slots,  # [tokens]
    q_norm,  # [DIM]
    k_norm,  # [DIM]
    eps,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_angle,
    stride_kc_block,
    stride_kc_token,
    stride_kc_head,
    stride_vc_block,
    stride_vc_token,
    stride_vc_head,
    heads,
    kv_heads,
    q_programs,  # programs of a token with a smaller number rotate queries, the others write keys and values
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if NORM:
        prefetch_constants((q_norm if part < q_programs else k_norm) + tl.arange(0, 32) * (DIM // 32), PDL)
    wait_for_previous(PDL)
    position = tl.load(positions + token).to(tl.int64)
    if part < q_programs:
        head = part * HEADS + tl.arange(0, HEADS)
        rows = q + token * stride_q_token + head[:, None] * stride_q_head
        angles = cos_sin + position * stride_angle
        _turn(rows, rows, q_norm, eps, angles, head < heads, HALF, HALF_BLOCK, DIM, TAIL_BLOCK, NORM, NORM)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = (part - q_programs) * HEADS + tl.arange(0, HEADS)
            live = head < kv_heads
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            source = k + token * stride_k_token + head[:, None] * stride_k_head
            target = k_cache + block * stride_kc_block + offset * stride_kc_token + head[:, None] * stride_kc_head
            angles = cos_sin + position * stride_angle
            if FORM > 0:
                inverse = _inverse_norm(source, eps, live, DIM, NORM)
                low = _rotated(source, 0, k_norm, inverse, angles, live, HALF, DIM, NORM)
                high = _rotated(source, DIM // 2, k_norm, inverse, angles, live, HALF, DIM, NORM)
                store_codes(low, high, target, k_scales, slot * kv_heads + head, live, DIM, FORM)
            else:
                _turn(source, target, k_norm, eps, angles, live, HALF, HALF_BLOCK, DIM, TAIL_BLOCK, NORM, True)
            if VALUE_DIM > 0:
                source = v + token * stride_v_token + head[:, None] * stride_v_head
                target = v_cache + block * stride_vc_block + offset * stride_vc_token + head[:, None] * stride_vc_head
                if FORM > 0:
                    low = load_half(source, 0, live, VALUE_DIM)
                    high = load_half(source, VALUE_DIM // 2, live, VALUE_DIM)
                    store_codes(low, high, target, v_scales, slot * kv_heads + head, live, VALUE_DIM, FORM)
                else:
                    _copy(source, target, live, VALUE_DIM, VALUE_BLOCK)


@triton.jit
def _turn(
    source,  # [HEADS, 1] pointers
    target,  # [HEADS, 1] pointers, perhaps the same
    norm,  # [DIM]
    eps,
    angles,
    live,  # [HEADS]
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    TAIL: tl.constexpr,  # whether what is not rotated must be written, too
):
    """Norm each head if asked to, turn its pairs (i, HALF + i), and keep the rest."""
    dim = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
    in_half = live[:, None] & (dim < HALF)
    in_rest = live[:, None] & (rest < DIM)
    # Rounded to the dtype of the source after each stage: so would separate ops, and the cache may be of another one.
    kind = source.dtype.element_ty
    if HALF > 0:
        left = tl.load(source + dim, mask=in_half, other=0.0).to(tl.float32)
        right = tl.load(source + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
    if TAIL and DIM > 2 * HALF:
        tail = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.zeros(live.shape, tl.float32)
        if HALF > 0:
            squares += tl.sum(left * left + right * right, 1)
        if DIM > 2 * HALF:
            squares += tl.sum(tail * tail, 1)
        inverse = tl.rsqrt(squares / DIM + eps)[:, None]
        if HALF > 0:
            left = left * inverse * tl.load(norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)
            right = right * inverse * tl.load(norm + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
            left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
        if DIM > 2 * HALF:
            tail = tail * inverse * tl.load(norm + rest, mask=rest < DIM, other=0.0).to(tl.float32)
    if HALF > 0:
        cos = tl.load(angles + dim, mask=dim < HALF, other=0.0)
        sin = tl.load(angles + HALF + dim, mask=dim < HALF, other=0.0)
        rotated_left = (left * cos - right * sin).to(kind)
        rotated_right = (right * cos + left * sin).to(kind)
        tl.store(target + dim, rotated_left.to(target.dtype.element_ty), mask=in_half)
        tl.store(target + HALF + dim, rotated_right.to(target.dtype.element_ty), mask=in_half)
    if TAIL and DIM > 2 * HALF:
        tl.store(target + rest, tail.to(kind).to(target.dtype.element_ty), mask=in_rest)


@triton.jit
def _rotated(
    source,  # [HEADS, 1] pointers
    FIRST: tl.constexpr,
    norm,  # [DIM]
    inverse,  # [HEADS, 1]
    angles,
    live,  # [HEADS]
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):  # [HEADS, DIM / 2 as a power of two] float32
    """What `_turn` stores of the channels from FIRST on, half of all."""
    kind = source.dtype.element_ty
    dim = FIRST + half_range(DIM)[None, :]
    inside = dim < FIRST + DIM // 2
    turns = inside & (dim < 2 * HALF)
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    mine = tl.load(source + dim, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    theirs = tl.load(source + other, mask=live[:, None] & turns, other=0.0).to(tl.float32)
    if NORM:
        mine = mine * inverse * tl.load(norm + dim, mask=inside, other=0.0).to(tl.float32)
        theirs = theirs * inverse * tl.load(norm + other, mask=turns, other=0.0).to(tl.float32)
        mine, theirs = mine.to(kind).to(tl.float32), theirs.to(kind).to(tl.float32)
    angle = tl.where(dim < HALF, dim, dim - HALF)
    cos = tl.load(angles + angle, mask=turns, other=1.0)
    sin = tl.load(angles + HALF + angle, mask=turns, other=0.0)
    return (mine * cos + theirs * tl.where(dim < HALF, -sin, sin)).to(kind).to(tl.float32)


@triton.jit
def _inverse_norm(source, eps, live, DIM: tl.constexpr, NORM: tl.constexpr):  # [HEADS, 1]
    if NORM:
        low, high = load_half(source, 0, live, DIM), load_half(source, DIM // 2, live, DIM)
        return tl.rsqrt(tl.sum(low * low + high * high, 1) / DIM + eps)[:, None]
    else:
        return tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def _copy(source, target, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    dim = tl.arange(0, BLOCK)
    inside = live[:, None] & (dim < WIDTH)[None, :]
    value = tl.load(source + dim[None, :], mask=inside, other=0.0)
    tl.store(target + dim[None, :], value.to(target.dtype.element_ty), mask=inside)


IMPLEMENTATIONS = tuple(
    declare(fn, head_dims=(1, MAX_HEAD_DIM), kv_forms=tuple(FORMS), kv_requires={"fp8": FLOAT8})
    for fn in (rope_kv_write, rope)
)
