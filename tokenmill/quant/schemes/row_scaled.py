"""Eight bits on both sides, a scale per weight row and one per input row: w8a8 (int8) and fp8 (e4m3)."""

from __future__ import annotations

import torch

from tokenmill.ops.matmul import Matmul, MatmulNeed, select_matmul
from tokenmill.ops.matmul_torch import FLOAT8, quantize_rows
from tokenmill.ops.types import Storage
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.scheme import QuantScheme, counters_beside

_CHUNK = 1 << 24  # elements quantized at once while loading, so that the wide copy stays small


class RowScaled(QuantScheme):
    """Codes of one dtype on both sides, a float32 scale per output channel, and per token or one for all of them.

    A checkpoint may hold the scale of the inputs (static). The parts of a fused matrix share their input, so the
    largest of their scales counts: nothing is clipped that one of them kept.
    """

    name: str
    code_dtype: torch.dtype

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        return {
            "weight": torch.empty(rows, columns, dtype=self.code_dtype, device=device),
            "scale": torch.empty(rows, dtype=torch.float32, device=device),
            **counters_beside(MatmulNeed(self.name, rows, columns, dtype, device)),
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

    whole_rows = True

    def rounded(self, weight: torch.Tensor) -> Groups:  # [n, in]
        quantized = quantize_rows(weight, self.code_dtype)
        return Groups(quantized.values, quantized.scale[:, None], 8)

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

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        (rows, columns), device = storage["weight"].shape, storage["weight"].device
        static = "input_scale" in storage
        return select_matmul(MatmulNeed(self.name, rows, columns, dtype, device, static_inputs=static))


class W8A8(RowScaled):
    """int8 weights; inputs always int8, with a scale per token, or with that of the checkpoint.

    Sums are integers and therefore exact: a row gives the same bits in any batch, whichever kernel computes it.
    """

    name = "w8a8"
    code_dtype = torch.int8


class Fp8(RowScaled):
    """e4m3 weights; inputs with a scale per token, or with that of the checkpoint.

    Without a scale from the checkpoint few rows are multiplied as they are (the weights are all that is read); only
    many rows are quantized, to use the float8 tensor cores. On CPUs and in wider dtypes the weight is widened for each
    product: slow, exact. Inputs with a scale of the checkpoint are rounded everywhere.
    """

    name = "fp8"
    code_dtype = FLOAT8
