"""Keys and values of tokens copied to where these stand in another sequence, keys turned on their way."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops import reference_place
from tokenmill.ops.kv_forms import KV_FORMS, KVScales
from tokenmill.ops.triton.config import MAX_HEAD_DIM, declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous


def place_kv(
    k_cache: torch.Tensor,  # [blocks, block_size, kv_heads, dim], or codes
    v_cache: torch.Tensor,  # [blocks, block_size, kv_heads, v_dim], or codes
    turns: torch.Tensor,  # [n, rot_dim] float32: cosines, then sines, of the angles between two places
    turn: torch.Tensor,  # [tokens] int64: which of these lies between a token's two
    source: torch.Tensor,  # [tokens] int64: slots; none is among the targets
    target: torch.Tensor,  # [tokens] int64
    scales: KVScales | None = None,  # beside the codes of a quantized cache
) -> None:
    """Codes are rounded anew in plain torch: modules are rare, and that is as exact."""
    if scales is not None:
        reference_place.place_kv(k_cache, v_cache, turns, turn, source, target, scales)
        return
    _, block_size, heads, dim = k_cache.shape
    value_dim, half = v_cache.shape[3], turns.shape[1] // 2
    heads_each = max(1, min(power_of_two(heads), 2048 // power_of_two(max(dim, value_dim))))
    _place_kernel[(len(source), ceil_div(heads, heads_each))](
        k_cache, v_cache, turns, turn, source, target, *k_cache.stride()[:3], *v_cache.stride()[:3], turns.stride(0),
        heads, HALF=half, HALF_BLOCK=power_of_two(half), DIM=dim, TAIL_BLOCK=power_of_two(dim - 2 * half),
        VALUE_DIM=value_dim, VALUE_BLOCK=power_of_two(value_dim), BLOCK_SIZE=block_size, HEADS=heads_each, num_warps=4,
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize_on_alignment=["turns", "turn", "source", "target"])
def _place_kernel(
    k_cache,  # [blocks, BLOCK_SIZE, heads, DIM]
    v_cache,  # [blocks, BLOCK_SIZE, heads, VALUE_DIM]
    turns,  # [n, 2 * HALF]
    turn,  # [tokens]
    source,  # [tokens]
    target,  # [tokens]
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    stride_turn,
    heads,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = (head < heads)[:, None]
    there = tl.load(source + token)
    here = tl.load(target + token)
    k_from = k_cache + (there // BLOCK_SIZE) * stride_k_block + (there % BLOCK_SIZE) * stride_k_token
    k_to = k_cache + (here // BLOCK_SIZE) * stride_k_block + (here % BLOCK_SIZE) * stride_k_token
    column = tl.arange(0, HALF_BLOCK)[None, :]
    angles = turns + tl.load(turn + token) * stride_turn
    cos = tl.load(angles + column, mask=column < HALF, other=1.0)
    sin = tl.load(angles + HALF + column, mask=column < HALF, other=0.0)
    at = head[:, None] * stride_k_head + column
    inside = live & (column < HALF)
    left = tl.load(k_from + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(k_from + HALF + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(k_to + at, (left * cos - right * sin).to(k_cache.dtype.element_ty), mask=inside)
    tl.store(k_to + HALF + at, (right * cos + left * sin).to(k_cache.dtype.element_ty), mask=inside)
    if DIM > 2 * HALF:
        tail = 2 * HALF + tl.arange(0, TAIL_BLOCK)[None, :]
        at = head[:, None] * stride_k_head + tail
        tl.store(k_to + at, tl.load(k_from + at, mask=live & (tail < DIM)), mask=live & (tail < DIM))
    v_from = v_cache + (there // BLOCK_SIZE) * stride_v_block + (there % BLOCK_SIZE) * stride_v_token
    v_to = v_cache + (here // BLOCK_SIZE) * stride_v_block + (here % BLOCK_SIZE) * stride_v_token
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    at = head[:, None] * stride_v_head + column
    inside = live & (column < VALUE_DIM)
    tl.store(v_to + at, tl.load(v_from + at, mask=inside), mask=inside)


IMPLEMENTATIONS = (declare(place_kv, head_dims=(1, MAX_HEAD_DIM), kv_forms=tuple(KV_FORMS)),)
