"""Products with float8 weights on the GPU: which kernel serves how many rows."""

from __future__ import annotations

import torch

from tokenmill.ops.triton.config import multiprocessors
from tokenmill.ops.triton.gemm_int8 import hopper_takes
from tokenmill.ops.triton.gemm_small import small_gemm
from tokenmill.ops.triton.launch import ceil_div

# Up to here rows stay in their own dtype; with more, float8 on both sides is faster in spite of the quantizing launch.
WIDE_INPUT_ROWS = 1
# From here on tiles of 128 rows are ahead, the library's or ours (scripts/gpu_w8a8.py).
TILED_ROWS = 65
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
    if values.shape[0] >= TILED_ROWS:
        hopper, library = hopper_takes(values, weight, dtype), _library_takes(weight, dtype)
        if hopper and not (library and _fills(values.shape[0], weight.shape[0], values.device)):
            from tokenmill.ops.triton.gemm_hopper import hopper_gemm

            return hopper_gemm(values, x_scale, weight, scale, bias, arrivals, dtype)
        if library:
            scales = x_scale[:, None], scale[None, :]
            out = torch._scaled_mm(values, weight.t(), *scales, out_dtype=dtype, use_fast_accum=True)
            return out if bias is None else out.add_(bias)
    return small_gemm(values, weight, bias, scale=scale, x_scale=x_scale, arrivals=arrivals, dtype=dtype)


def _fills(rows: int, columns: int, device: torch.device) -> bool:
    """Whether there are tiles for most of the device: then the library is level or ahead. With fewer it is behind,
    because it does not cut the inner dimension into parts (36.4 us, ours 29.7, of 256 rows with 4096 x 14336).
    """
    return 4 * ceil_div(rows, 128) * ceil_div(columns, 128) > 3 * multiprocessors(device)


def _library_takes(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and all(size % _LIBRARY_ALIGNMENT == 0 for size in weight.shape)
