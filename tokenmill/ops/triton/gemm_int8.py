"""Products of int8 with int8 on the GPU: which kernel serves how many rows."""

from __future__ import annotations

import torch

from tokenmill.ops.triton.gemm_small import small_gemm
from tokenmill.ops.triton.versions import EIGHT_BITS, usable

HOPPER_ROWS = 65  # from here on the kernel with tiles of 128 rows is ahead (scripts/gpu_w8a8.py)


def int8_gemm(
    values: torch.Tensor,  # [rows, inner] int8
    x_scale: torch.Tensor,  # [rows] float32
    weight: torch.Tensor,  # [columns, inner] int8
    scale: torch.Tensor,  # [columns] float32
    bias: torch.Tensor | None,  # [columns]
    arrivals: torch.Tensor,  # see small_gemm
    dtype: torch.dtype,  # of the result
) -> torch.Tensor:  # [rows, columns]
    if values.shape[0] >= HOPPER_ROWS and hopper_takes(values, weight, dtype):
        from tokenmill.ops.triton.gemm_hopper import hopper_gemm

        return hopper_gemm(values, x_scale, weight, scale, bias, arrivals, dtype)
    return small_gemm(values, weight, bias, scale=scale, x_scale=x_scale, arrivals=arrivals, dtype=dtype)


def hopper_takes(values: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether gemm_hopper.py can multiply these: results of 16 bits, rows aligned as the copy engine needs them."""
    if dtype not in (torch.bfloat16, torch.float16) or not usable(EIGHT_BITS, values.device):
        return False
    aligned = values.is_contiguous() and values.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return aligned and weight.shape[1] % 16 == weight.shape[0] % 8 == 0
