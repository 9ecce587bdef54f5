"""RowScaled: what the schemes with eight bits on both sides share: a scale per weight row, and one per input row."""

from __future__ import annotations

import torch

from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.device import arrivals_for, has_small_gemm
from tokenmill.quant.schemes.scheme import QuantizedRows, Storage

FLOAT8 = torch.float8_e4m3fn
LIMITS = {FLOAT8: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}
_COUNTED_ROW_TILES = 4  # sums are cut into parts up to several hundred rows
_CHUNK = 1 << 24  # elements quantized at once while loading, so that the wide copy stays small


def quantize_rows(
    x: torch.Tensor,  # [..., in]
    dtype: torch.dtype = FLOAT8,  # or int8
    fixed: torch.Tensor | None = None,  # [] float32: the scale of every row
) -> QuantizedRows:
    """Each row divided by its own scale, so that its largest magnitude becomes the largest code; or all by one.

    A row with something that is not finite keeps a scale that is not: so are its products, and whoever looks sees it.
    """
    low, high = LIMITS[dtype]
    wide = x.float()
    top = wide.abs().amax(-1)
    if fixed is None:
        scale = torch.where(top == 0, 1.0, top / high)
    else:
        scale = torch.where(top.isfinite(), fixed, top)
    codes = wide / scale[..., None]
    codes = codes.round() if dtype == torch.int8 else codes
    return QuantizedRows(codes.clamp(low, high).to(dtype), scale, x.dtype)


class RowScaled:
    """Codes of one dtype on both sides, a float32 scale per output channel, and per token or one for all of them.

    A checkpoint may hold the scale of the inputs (static). The parts of a fused matrix share their input, so the
    largest of their scales counts: nothing is clipped that one of them kept.
    """

    code_dtype: torch.dtype

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        return {
            "weight": torch.empty(rows, columns, dtype=self.code_dtype, device=device),
            "scale": torch.empty(rows, dtype=torch.float32, device=device),
            **arrivals_for(_COUNTED_ROW_TILES * rows, device),
        }

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns + rows * 4

    def input_bytes(self, columns: int) -> int:
        return columns + 4

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        values, scales = storage["weight"], storage["scale"]
        step = max(1, _CHUNK // max(weight.shape[1], 1))
        for part in torch.split(weight, step):
            rows = slice(first_row, first_row + part.shape[0])
            quantized = quantize_rows(part.to(values.device), self.code_dtype)
            values[rows], scales[rows] = quantized.values, quantized.scale
            first_row = rows.stop

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None:
        """Exact where codes are of this scheme's dtype with one scale per row; otherwise they are rounded again."""
        if groups.codes.dtype != self.code_dtype or groups.zeros is not None or groups.scale.shape[1] != 1:
            return self.write(storage, first_row, groups.widen(torch.float32))
        rows = slice(first_row, first_row + groups.codes.shape[0])
        storage["weight"][rows] = groups.codes.to(storage["weight"].device)
        storage["scale"][rows] = groups.scale[:, 0].to(storage["scale"])
        if groups.input_scale is not None:
            given = groups.input_scale.to(storage["scale"]).reshape(())
            known = storage.get("input_scale")
            storage["input_scale"] = given if known is None else torch.maximum(known, given)

    def quantize(self, x: torch.Tensor, storage: Storage) -> QuantizedRows:  # [..., in]
        """An input as `matmul` wants it."""
        fixed = storage.get("input_scale")
        if x.dtype == torch.float64 or not has_small_gemm(x.device):
            return quantize_rows(x, self.code_dtype, fixed)
        from tokenmill.ops.triton import quantize

        values, scale = quantize.quantize_rows(x.flatten(0, -2), self.code_dtype, fixed)
        return QuantizedRows(values.view(x.shape), scale.view(x.shape[:-1]), x.dtype)
