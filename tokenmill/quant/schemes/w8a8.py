"""W8A8: weights and inputs as int8, multiplied as integers; one scale per output channel and one per token."""

from __future__ import annotations

import torch

from tokenmill.quant.schemes.device import has_small_gemm
from tokenmill.quant.schemes.row_scaled import RowScaled
from tokenmill.quant.schemes.scheme import QuantizedRows, Storage

_EXACT_TERMS = 1024  # so many products of two int8 add up to at most 2^24: float32 knows every integer up to there


class W8A8(RowScaled):
    """int8 weights; inputs always int8, with a scale per token, or with that of the checkpoint.

    Sums are integers and therefore exact: a row gives the same bits in any batch, whichever kernel computes it.
    """

    name = "w8a8"
    code_dtype = torch.int8

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        return True

    def matmul(
        self,
        x: torch.Tensor | QuantizedRows,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        rows = x if isinstance(x, QuantizedRows) else self.quantize(x, storage)
        weight, scale = storage["weight"], storage["scale"]
        if rows.dtype == torch.float64 or not has_small_gemm(weight.device):
            return _plain(rows, weight, scale, bias)
        from tokenmill.ops.triton.gemm_int8 import int8_gemm

        values, x_scale = rows.values.flatten(0, -2), rows.scale.flatten()
        out = int8_gemm(values, x_scale, weight, scale, bias, storage["arrivals"], rows.dtype)
        return out.view(*rows.values.shape[:-1], weight.shape[0])


def _plain(
    rows: QuantizedRows,  # [..., in]
    weight: torch.Tensor,  # [out, in] int8
    scale: torch.Tensor,  # [out] float32
    bias: torch.Tensor | None,  # [out]
) -> torch.Tensor:  # [..., out]
    """In pieces that float32 adds up exactly: on CPUs its products are the fastest that torch has for sure."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(*rows.values.shape[:-1], weight.shape[0], dtype=torch.int32, device=weight.device)
    for left, right in zip(*(torch.split(codes, _EXACT_TERMS, -1) for codes in (rows.values, weight))):
        total += (left.float() @ right.float().T).int()
    out = total.to(wide) * scale * rows.scale[..., None]
    return (out if bias is None else out + bias).to(rows.dtype)
