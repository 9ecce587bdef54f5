"""Fp8: weights as float8 (e4m3) with a scale per output channel, from a checkpoint or quantized as they are loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.quant.schemes.device import has_small_gemm
from tokenmill.quant.schemes.row_scaled import FLOAT8, RowScaled
from tokenmill.quant.schemes.scheme import QuantizedRows, Storage

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Fp8(RowScaled):
    """e4m3 weights; inputs with a scale per token, or with that of the checkpoint.

    Without a scale from the checkpoint few rows are multiplied as they are (the weights are all that is read); only
    many rows are quantized, to use the float8 tensor cores. On CPUs and in wider dtypes the weight is widened for each
    product: slow, exact. Inputs with a scale of the checkpoint are rounded everywhere.
    """

    name = "fp8"
    code_dtype = FLOAT8

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        if "input_scale" in storage:
            return True
        if dtype not in _KERNEL_DTYPES or not has_small_gemm(storage["weight"].device):
            return False
        from tokenmill.ops.triton.gemm_fp8 import WIDE_INPUT_ROWS

        return rows > WIDE_INPUT_ROWS

    def matmul(
        self,
        x: torch.Tensor | QuantizedRows,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        weight = storage["weight"]
        if isinstance(x, torch.Tensor) and self.wants_quantized(storage, x.numel() // x.shape[-1], x.dtype):
            x = self.quantize(x, storage)
        if x.dtype not in _KERNEL_DTYPES or not has_small_gemm(weight.device):
            return self._widened(x.widen() if isinstance(x, QuantizedRows) else x, storage, bias)
        from tokenmill.ops.triton.gemm_fp8 import fp8_gemm_quantized
        from tokenmill.ops.triton.gemm_small import small_gemm

        scale, arrivals = storage["scale"], storage["arrivals"]
        if isinstance(x, torch.Tensor):
            out = small_gemm(x.flatten(0, -2), weight, bias, scale=scale, arrivals=arrivals)
            return out.view(*x.shape[:-1], weight.shape[0])
        values, x_scale = x.values.flatten(0, -2), x.scale.flatten()
        out = fp8_gemm_quantized(values, x_scale, weight, scale, bias, arrivals, x.dtype)
        return out.view(*x.values.shape[:-1], weight.shape[0])

    def _widened(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = storage["weight"].to(wide) * storage["scale"][:, None]
        return F.linear(x, weight.to(x.dtype), bias)
