"""Fp8: weights as float8 (e4m3) with one scale per output channel, quantized as they are loaded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.quant.device import arrivals_for, has_small_gemm
from tokenmill.quant.scheme import QuantizedRows, Storage

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
_CHUNK = 1 << 24  # elements quantized at once while loading, so that the wide copy stays small
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def quantize_rows(x: torch.Tensor) -> QuantizedRows:  # [..., in]
    """Each row divided by its own scale, so that its largest magnitude becomes the largest float8."""
    wide = x.float()
    top = wide.abs().amax(-1)
    scale = torch.where(top == 0, 1.0, top / LARGEST)
    return QuantizedRows((wide / scale[..., None]).clamp(-LARGEST, LARGEST).to(FLOAT8), scale, x.dtype)


class Fp8:
    """e4m3 weights, a float32 scale per output channel; activations dynamic, one scale per token.

    Few rows are multiplied as they are (the weights are all that is read); only many rows are quantized, to use the
    float8 tensor cores. On CPUs and in wider dtypes the weight is widened for each product: slow, exact.
    """

    name = "fp8"

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        return {
            "weight": torch.empty(rows, columns, dtype=FLOAT8, device=device),
            "scale": torch.empty(rows, dtype=torch.float32, device=device),
            **arrivals_for(rows, device),
        }

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns + rows * 4

    def input_bytes(self, columns: int) -> int:
        return columns + 4

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        if dtype not in _KERNEL_DTYPES or not has_small_gemm(storage["weight"].device):
            return False
        from tokenmill.ops.triton.gemm_fp8 import WIDE_INPUT_ROWS

        return rows > WIDE_INPUT_ROWS

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        values, scales = storage["weight"], storage["scale"]
        step = max(1, _CHUNK // max(weight.shape[1], 1))
        for part in torch.split(weight, step):
            rows = slice(first_row, first_row + part.shape[0])
            quantized = quantize_rows(part.to(values.device))
            values[rows], scales[rows] = quantized.values, quantized.scale
            first_row = rows.stop

    def matmul(
        self,
        x: torch.Tensor | QuantizedRows,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        weight = storage["weight"]
        if x.dtype not in _KERNEL_DTYPES or not has_small_gemm(weight.device):
            return self._widened(x.widen() if isinstance(x, QuantizedRows) else x, storage, bias)
        from tokenmill.ops.triton.gemm_fp8 import fp8_gemm, fp8_gemm_quantized

        fixed = weight, storage["scale"], bias, storage["arrivals"]
        if isinstance(x, QuantizedRows):
            lead = x.values.shape[:-1]
            out = fp8_gemm_quantized(x.values.flatten(0, -2), x.scale.flatten(), *fixed, x.dtype)
        else:
            lead = x.shape[:-1]
            out = fp8_gemm(x.flatten(0, -2), *fixed)
        return out.view(*lead, weight.shape[0])

    def _widened(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = storage["weight"].to(wide) * storage["scale"][:, None]
        return F.linear(x, weight.to(x.dtype), bias)
