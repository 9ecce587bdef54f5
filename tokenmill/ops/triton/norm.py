"""RMSNorm, alone and fused with the residual add: one pass over memory, sums in float32."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import ceil_div, quick_launch, start_next, wait_for_previous


def rms_norm(
    x: torch.Tensor,  # [..., dim]
    weight: torch.Tensor,  # [dim], any float dtype
    eps: float,
) -> torch.Tensor:
    # At most two leading dims as they are: heads that are slices of a fused tensor need no copy.
    rows = x if x.stride(-1) == 1 and 2 <= x.dim() <= 3 else x.reshape(-1, x.shape[-1]).contiguous()
    outer, dim = rows.shape[0], rows.shape[-1]
    inner, stride_inner = (1, dim) if rows.dim() == 2 else (rows.shape[1], rows.stride(1))
    out = x.new_empty(x.shape)
    total = outer * inner
    block = power_of_two(dim)
    # A function of dim alone: how a row is summed must not depend on how many rows there are.
    rows_each = max(1, min(16, 2048 // block))
    _norm_kernel[(ceil_div(total, rows_each),)](
        rows, weight, out, eps, total, inner, rows.stride(0), stride_inner,
        DIM=dim, BLOCK=block, ROWS=rows_each, num_warps=_warps(block * rows_each),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,  # [tokens, dim], overwritten with the norm
    residual: torch.Tensor,  # [tokens, dim], overwritten with the sum
    weight: torch.Tensor,  # [dim]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, dim = x.shape
    assert x.dtype == residual.dtype and x.stride(1) == residual.stride(1) == 1
    block = power_of_two(dim)
    _add_norm_kernel[(tokens,)](
        x, residual, weight, eps, x.stride(0), residual.stride(0),
        DIM=dim, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return x, residual


def _warps(elements: int) -> int:
    return max(1, min(16, elements // 512))


@quick_launch
@triton.jit(do_not_specialize=["total"])  # it changes with every batch
def _norm_kernel(
    x,  # [total / inner, inner, DIM]
    weight,  # [DIM]
    out,  # [total, DIM]
    eps,
    total,
    inner,
    stride_outer,
    stride_inner,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    inside = (row < total)[:, None] & (dim < DIM)[None, :]
    source = (row // inner) * stride_outer + (row % inner) * stride_inner
    gain = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    wide = tl.load(x + source[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
    normed = wide * inverse[:, None] * gain[None, :]
    tl.store(out + row[:, None] * DIM + dim[None, :], normed.to(out.dtype.element_ty), mask=inside)


@quick_launch
@triton.jit
def _add_norm_kernel(
    x,  # [tokens, DIM]
    residual,  # [tokens, DIM]
    weight,  # [DIM]
    eps,
    stride_x,
    stride_residual,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    inside = dim < DIM
    x += token * stride_x
    normed = add_norm_row(x, residual + token * stride_residual, weight, eps, dim, inside, DIM, PDL)
    tl.store(x + dim, normed.to(x.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_row(x, residual, weight, eps, dim, inside, DIM: tl.constexpr, PDL: tl.constexpr):  # [BLOCK] float32
    """The norm of x + residual, which takes the residual's place."""
    gain = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    addend = tl.load(x + dim, mask=inside, other=0.0).to(tl.float32)
    total = (tl.load(residual + dim, mask=inside, other=0.0).to(tl.float32) + addend).to(residual.dtype.element_ty)
    tl.store(residual + dim, total, mask=inside)
    # The norm is of the sum as stored, so that a later step that reads it back sees the same number.
    wide = total.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps) * gain


IMPLEMENTATIONS = (declare(rms_norm), declare(add_rms_norm))
