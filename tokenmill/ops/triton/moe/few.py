"""A mixture of experts for a few tokens: every choice reads the rows of its expert, at the speed of memory."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.numeric import activate

_DOWN_DEPTH = 8192  # numbers of one row of weights, over all experts of a token, that are on their way at once


@dataclass(frozen=True)
class FewTile:
    """Rows of weights that one program reads, and its warps."""

    rows: int
    num_warps: int


def few_shapes(dtype: torch.dtype) -> tuple[FewTile, FewTile]:
    """For gate_up and for down, which holds rows of all its experts at once."""
    return (FewTile(2, 4), FewTile(1, 4)) if dtype == torch.float32 else (FewTile(4, 4), FewTile(1, 2))


def few(
    x: torch.Tensor,  # [tokens, hidden]
    weights: torch.Tensor,  # [tokens, k]
    experts: torch.Tensor,  # [tokens, k]
    gate_up: torch.Tensor,  # [experts, 2 * inner, hidden]
    down: torch.Tensor,  # [experts, hidden, inner]
    kind: str,
    launch: tuple[FewTile, FewTile],
) -> torch.Tensor:  # [tokens, hidden]
    """Choices of one expert run side by side, so the second read hits the cache."""
    (tokens, k), hidden, inner = experts.shape, x.shape[1], down.shape[2]
    first, second = launch
    active = torch.empty(tokens * k, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(tokens * k, ceil_div(inner, first.rows))](
        x, experts, gate_up, active, x.stride(0), gate_up.stride(0), gate_up.stride(1),
        HIDDEN=hidden, INNER=inner, PLACES=k, SILU=kind == "silu", ROWS=first.rows,
        DEPTH=min(power_of_two(hidden), 2048), num_warps=first.num_warps,
    )  # fmt: skip
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    places = power_of_two(k)
    _down_kernel[(tokens, ceil_div(hidden, second.rows))](
        active, weights, experts, down, out, down.stride(0), down.stride(1),
        HIDDEN=hidden, INNER=inner, PLACES=k, BLOCK_PLACES=places, ROWS=second.rows,
        DEPTH=min(power_of_two(inner), max(16, _DOWN_DEPTH // places)), num_warps=second.num_warps,
    )  # fmt: skip
    return out


@quick_launch
@triton.jit
def _gate_up_kernel(
    x,  # [tokens, HIDDEN]
    experts,  # [choices]
    gate_up,  # [experts, 2 * INNER, HIDDEN]
    out,  # [choices, INNER]
    stride_token,
    stride_expert,
    stride_row,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr = False,
):
    wait_for_previous(PDL)
    start_next(PDL)  # behind the wait: the next kernel relies on the experts being there
    choice = tl.program_id(0)
    expert = tl.load(experts + choice).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    gate_at = gate_up + expert * stride_expert + n[:, None] * stride_row + k[None, :]
    gate = tl.zeros([ROWS, DEPTH], tl.float32)
    up = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in tl.static_range(0, HIDDEN, DEPTH):
        inside = (n < INNER)[:, None] & (k + start < HIDDEN)[None, :]
        row = tl.load(x + (choice // PLACES) * stride_token + start + k, mask=k + start < HIDDEN, other=0.0)
        row = row.to(tl.float32)[None, :]
        gate += row * tl.load(gate_at + start, mask=inside, other=0.0).to(tl.float32)
        up += row * tl.load(gate_at + INNER * stride_row + start, mask=inside, other=0.0).to(tl.float32)
    active = activate(tl.sum(gate, 1), SILU) * tl.sum(up, 1)
    tl.store(out + choice * INNER + n, active.to(out.dtype.element_ty), mask=n < INNER)


@quick_launch
@triton.jit
def _down_kernel(
    active,  # [tokens, PLACES, INNER]
    weights,  # [tokens, PLACES]
    experts,  # [tokens, PLACES]
    down,  # [experts, HIDDEN, INNER]
    out,  # [tokens, HIDDEN]
    stride_expert,
    stride_row,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Its weights are on their way before the activations are there.

    The experts are read above the wait: the kernel before let this one start only after its own wait for them.
    """
    start_next(PDL)
    token = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    place = tl.arange(0, BLOCK_PLACES)
    choice = token * PLACES + place
    expert = tl.load(experts + choice, mask=place < PLACES, other=0).to(tl.int64)
    row_at = down + expert[None, :] * stride_expert + n[:, None] * stride_row  # [ROWS, BLOCK_PLACES]
    there = (n < HIDDEN)[:, None] & (place < PLACES)[None, :]
    at = row_at[:, :, None] + k[None, None, :]
    tile = tl.load(at, mask=there[:, :, None] & (k < INNER)[None, None, :], other=0.0)
    wait_for_previous(PDL)
    share = tl.load(weights + choice, mask=place < PLACES, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK_PLACES, DEPTH], tl.float32)
    for start in tl.static_range(0, INNER, DEPTH):
        inside = (k + start < INNER)[None, :] & (place < PLACES)[:, None]
        if start > 0:
            tile = tl.load(at + start, mask=there[:, :, None] & (k + start < INNER)[None, None, :], other=0.0)
        rows = tl.load(active + choice[:, None] * INNER + (start + k)[None, :], mask=inside, other=0.0)
        total += tile.to(tl.float32) * (rows.to(tl.float32) * share[:, None])[None, :, :]
    result = tl.sum(tl.sum(total, 2), 1)
    tl.store(out + token * HIDDEN + n, result.to(out.dtype.element_ty), mask=n < HIDDEN)
