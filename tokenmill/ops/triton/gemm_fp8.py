"""Products with float8 weights on the GPU: which kernel serves how many rows."""

from __future__ import annotations

import torch

from tokenmill.ops.triton.gemm_int8 import hopper_takes
from tokenmill.ops.triton.gemm_small import small_gemm

# Up to here rows stay in their own dtype; with more, float8 on both sides is faster in spite of the quantizing launch.
WIDE_INPUT_ROWS = 1
# Where the library is ahead of ours (scripts/gpu_gemm.py): many rows, or fewer of a wide matrix.
LIBRARY_ROWS = 129
LIBRARY_ROWS_WIDE, WIDE_COLUMNS = 65, 16384
_LIBRARY_ALIGNMENT = 16  # both dims of the weight, elements


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
    if values.shape[0] >= most and _library_takes(weight, dtype):
        scales = x_scale[:, None], scale[None, :]
        out = torch._scaled_mm(values, weight.t(), *scales, out_dtype=dtype, use_fast_accum=True)
        return out if bias is None else out.add_(bias)
    if values.shape[0] >= most and hopper_takes(values, weight, dtype):
        from tokenmill.ops.triton.gemm_hopper import hopper_gemm

        return hopper_gemm(values, x_scale, weight, scale, bias, arrivals, dtype)
    return small_gemm(values, weight, bias, scale=scale, x_scale=x_scale, arrivals=arrivals, dtype=dtype)


def _library_takes(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and all(size % _LIBRARY_ALIGNMENT == 0 for size in weight.shape)
