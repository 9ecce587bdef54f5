"""Products with float8 weights on the GPU: which kernel serves how many rows."""

from __future__ import annotations

import torch

from tokenmill.ops.triton.gemm_small import small_gemm
from tokenmill.ops.triton.quantize import quantize_rows

# Up to here rows stay in their own dtype; with more, float8 on both sides is faster in spite of the quantizing launch.
WIDE_INPUT_ROWS = 1
# Where the library is ahead of ours (scripts/gpu_gemm.py): many rows, or fewer of a wide matrix.
LIBRARY_ROWS = 129
LIBRARY_ROWS_WIDE, WIDE_COLUMNS = 65, 16384
_LIBRARY_ALIGNMENT = 16  # both dims of the weight, elements


def fp8_gemm(
    x: torch.Tensor,  # [rows, inner]
    weight: torch.Tensor,  # [columns, inner] float8_e4m3fn
    scale: torch.Tensor,  # [columns] float32
    bias: torch.Tensor | None,  # [columns]
    arrivals: torch.Tensor,  # see small_gemm
) -> torch.Tensor:  # [rows, columns]
    if x.shape[0] <= WIDE_INPUT_ROWS:
        return small_gemm(x, weight, bias, scale=scale, arrivals=arrivals)
    values, x_scale = quantize_rows(x)
    return fp8_gemm_quantized(values, x_scale, weight, scale, bias, arrivals, x.dtype)


def fp8_gemm_quantized(
    values: torch.Tensor,  # [rows, inner] float8_e4m3fn
    x_scale: torch.Tensor,  # [rows] float32
    weight: torch.Tensor,  # [columns, inner] float8_e4m3fn
    scale: torch.Tensor,  # [columns] float32
    bias: torch.Tensor | None,  # [columns]
    arrivals: torch.Tensor,  # see small_gemm
    dtype: torch.dtype,  # of the result
) -> torch.Tensor:  # [rows, columns]
    most = LIBRARY_ROWS_WIDE if weight.shape[0] >= WIDE_COLUMNS else LIBRARY_ROWS
    if values.shape[0] < most or not _library_takes(weight, dtype):
        return small_gemm(values, weight, bias, scale=scale, x_scale=x_scale, arrivals=arrivals, dtype=dtype)
    out = torch._scaled_mm(
        values, weight.t(), x_scale[:, None], scale[None, :], out_dtype=dtype, use_fast_accum=True
    )
    return out if bias is None else out.add_(bias)


def _library_takes(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and all(size % _LIBRARY_ALIGNMENT == 0 for size in weight.shape)
