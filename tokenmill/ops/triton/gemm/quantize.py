"""Rows of activations as float8 or int8 with their scales: of a tensor as it is, of a norm, of a gated activation.

All three take one pass over memory; the fused ones round to the model's dtype before they quantize, as two ops would.
Each row has its own scale, or all have one that is given: a constant of the model.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.ops.device_facts import PRODUCTS
from tokenmill.ops.triton.config import declare, power_of_two
from tokenmill.ops.triton.launch import quick_launch, start_next, wait_for_previous
from tokenmill.ops.triton.norm import add_norm_row
from tokenmill.ops.triton.numeric import activate

FLOAT8 = torch.float8_e4m3fn
LEAST_TOP = tl.constexpr(1e-30)  # far below any activation, and what divides by it is finite
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float32 of this size has no bits for fractions


def quantize_rows(
    x: torch.Tensor,  # [rows, inner]
    dtype: torch.dtype = FLOAT8,  # or int8
    fixed: torch.Tensor | None = None,  # [] float32: the scale of every row
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, inner] in dtype, [rows] float32
    """values * scale[:, None] is x, up to rounding; a row of zeros has scale one, or the fixed one."""
    rows, inner = x.shape
    assert x.stride(1) == 1
    values, scale = _empty(rows, inner, dtype, x.device)
    block = power_of_two(inner)
    _quantize_kernel[(rows,)](
        x, fixed, values, scale, inner, x.stride(0), BLOCK=block, EVEN=block == inner, num_warps=_warps(block)
    )
    return values, scale


def add_rms_norm_quantized(
    x: torch.Tensor,  # [rows, dim]
    residual: torch.Tensor,  # [rows, dim], overwritten with the sum
    weight: torch.Tensor,  # [dim]
    eps: float,
    dtype: torch.dtype = FLOAT8,  # or int8
    fixed: torch.Tensor | None = None,  # [] float32: the scale of every row
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of x + residual in dtype [rows, dim] and its scale [rows], and the new residual."""
    rows, dim = x.shape
    assert x.dtype == residual.dtype and x.stride(1) == residual.stride(1) == 1
    values, scale = _empty(rows, dim, dtype, x.device)
    block = power_of_two(dim)
    _add_norm_kernel[(rows,)](
        x, residual, weight, fixed, values, scale, eps, x.stride(0), residual.stride(0),
        DIM=dim, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return values, scale, residual


def act_mul_quantized(
    x: torch.Tensor,  # [rows, 2 * inner]: gate, then up
    kind: str,  # "silu" or "gelu_tanh"
    dtype: torch.dtype = FLOAT8,  # or int8
    fixed: torch.Tensor | None = None,  # [] float32: the scale of every row
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, inner] in dtype, [rows] float32
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is not one of silu, gelu_tanh")
    rows, inner = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    values, scale = _empty(rows, inner, dtype, x.device)
    block = power_of_two(inner)
    _act_mul_kernel[(rows,)](
        x, fixed, values, scale, inner, x.stride(0), SILU=kind == "silu", BLOCK=block, num_warps=_warps(block)
    )
    return values, scale


def _empty(rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(rows, inner, dtype=dtype, device=device)
    return values, torch.empty(rows, dtype=torch.float32, device=device)


def _warps(block: int) -> int:
    """Many, and a function of the row's length alone: how a row is summed must not depend on how many rows there are.

    Large programs, so that those that start early cannot gather on the few multiprocessors that the product before
    them left free (scripts/gpu_w8a8.py tries other numbers).
    """
    return max(1, min(32, block // 256))


@quick_launch
@triton.jit
def _quantize_kernel(
    x,  # [rows, inner]
    fixed,  # [] or None
    values,  # [rows, inner]
    scale,  # [rows]
    inner,
    stride_row,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < inner
    wait_for_previous(PDL)
    if EVEN:
        wide = tl.load(x + row * stride_row + k).to(tl.float32)
    else:
        wide = tl.load(x + row * stride_row + k, mask=inside, other=0.0).to(tl.float32)
    _store_codes(wide, fixed, values + row * inner + k, scale + row, inside)


@quick_launch
@triton.jit
def _add_norm_kernel(
    x,  # [rows, DIM]
    residual,  # [rows, DIM]
    weight,  # [DIM]
    fixed,  # [] or None
    values,  # [rows, DIM]
    scale,  # [rows]
    eps,
    stride_x,
    stride_residual,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    inside = dim < DIM
    residual += row * stride_residual
    normed = add_norm_row(x + row * stride_x, residual, weight, eps, dim, inside, DIM, PDL)
    rounded = normed.to(x.dtype.element_ty).to(tl.float32)
    _store_codes(rounded, fixed, values + row * DIM + dim, scale + row, inside)


@quick_launch
@triton.jit
def _act_mul_kernel(
    x,  # [rows, 2 * inner]
    fixed,  # [] or None
    values,  # [rows, inner]
    scale,  # [rows]
    inner,
    stride_row,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < inner
    dtype = x.dtype.element_ty
    wait_for_previous(PDL)
    gate = tl.load(x + row * stride_row + k, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_row + inner + k, mask=inside, other=0.0).to(tl.float32)
    product = (activate(gate, SILU).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    _store_codes(product, fixed, values + row * inner + k, scale + row, inside)


@triton.jit
def _store_codes(wide, fixed, values, scale, inside):
    """One row in float32 as codes, and the factor that undoes it.

    A row with something that is not finite gets an infinite factor: it must not vanish in the clamp. Few
    instructions for each number: a multiprocessor has several rows of thousands to go through.
    """
    dtype: tl.constexpr = values.dtype.element_ty
    HIGHEST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    LOWEST: tl.constexpr = -128.0 if dtype == tl.int8 else -448.0
    top = tl.reduce(tl.abs(wide), 0, _larger)
    if fixed is None:
        factor = tl.where(top == 0.0, 1.0, tl.maximum(top, LEAST_TOP) / HIGHEST)
    else:
        factor = tl.load(fixed)
    factor = tl.where(top < float("inf"), factor, float("inf"))
    quotient = wide * (1.0 / factor)
    if fixed is not None:  # a factor of the row's own leaves nothing to clamp
        quotient = tl.clamp(quotient, LOWEST, HIGHEST)
    tl.store(scale, factor)
    if dtype == tl.int8:
        # The last bits of the sum are the nearest integer, ties to even.
        tl.store(values, (quotient + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8), mask=inside)
    else:
        tl.store(values, quotient.to(dtype), mask=inside)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


# Only products of our own read rows that are quantized on the way.
IMPLEMENTATIONS = tuple(
    declare(fn, requires=PRODUCTS, optional=True) for fn in (add_rms_norm_quantized, act_mul_quantized)
)
