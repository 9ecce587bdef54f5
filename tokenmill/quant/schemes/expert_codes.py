"""ExpertCodes: experts in four or eight bits where they are tensors: what grouped products on a GPU read."""

from __future__ import annotations

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.matmul import Matmul, MatmulKernel, MatmulNeed, only
from tokenmill.ops.matmul_torch import multiply_dense, quantize_rows
from tokenmill.ops.types import Storage
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.schemes.scheme import QuantScheme

PAIRED = 32  # columns of four bits of which the first half lies in the low and the second in the high bits of 16 bytes
_CHUNK = 1 << 24  # elements rounded at once while loading


class ExpertCodes(QuantScheme):
    """Codes row by row: int8, float8, or two of four bits in a byte; a float32 scale per row or group, and zeros.

    With w8a8 inputs are rounded to int8; other forms multiply them as they are, also fp8.
    """

    def __init__(self, form: WeightForm) -> None:
        self.form = form
        self.name = f"experts {form.name}"
        self.experts_op = "moe_w8a8" if form.kind == "w8a8" else "moe_codes"

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        group = self.form.group or columns
        if columns % group or (self.form.kind == "int4" and columns % PAIRED):
            raise ConfigError(f"quantization: experts of {rows} x {columns} cannot be {self.form.name}; take int8")
        kind = {"int4": torch.uint8, "fp8": torch.float8_e4m3fn}.get(self.form.kind, torch.int8)
        width = columns // 2 if self.form.kind == "int4" else columns
        storage = {
            "weight": torch.empty(rows, width, dtype=kind, device=device),
            "scale": torch.empty(rows, columns // group, dtype=torch.float32, device=device),
        }
        if self.form.zeros:
            storage["zeros"] = torch.empty(rows, columns // group, dtype=torch.int8, device=device)
        return storage

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        groups = columns // (self.form.group or columns) * (5 if self.form.zeros else 4)
        return rows * (columns // (2 if self.form.kind == "int4" else 1) + groups)

    def input_bytes(self, columns: int) -> int:
        return columns + 4 if self.form.kind == "w8a8" else 0

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        for part in torch.split(weight, max(1, _CHUNK // max(weight.shape[1], 1))):
            self.write_groups(storage, first_row, self.rounded(part.to(storage["weight"].device)))
            first_row += part.shape[0]

    @property
    def whole_rows(self) -> bool:
        return self.form.group is None

    def rounded(self, weight: torch.Tensor) -> Groups:  # [n, in]
        return round_to_nearest(weight, self.form)

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None:
        """Codes are kept; of scales for more columns than a group has, several groups get the same."""
        weight, scale = storage["weight"], storage["scale"]
        rows, repeats = slice(first_row, first_row + len(groups.codes)), scale.shape[1] // groups.scale.shape[1]
        codes = groups.codes.to(weight.device)
        weight[rows] = paired(codes) if weight.dtype == torch.uint8 else codes
        scale[rows] = groups.scale.to(scale).repeat_interleave(repeats, dim=1)
        if self.form.zeros:
            zeros = torch.zeros(groups.scale.shape) if groups.zeros is None else groups.zeros
            storage["zeros"][rows] = zeros.to(storage["zeros"]).repeat_interleave(repeats, dim=1)

    def groups(self, storage: Storage) -> Groups:
        """What is stored, in the neutral form."""
        weight = storage["weight"]
        codes = unpaired(weight) if weight.dtype == torch.uint8 else weight
        return Groups(codes, storage["scale"], 4 if weight.dtype == torch.uint8 else 8, storage.get("zeros"))

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        """Of one expert, in plain torch."""
        rows, columns = storage["weight"].shape
        need = MatmulNeed(self.name, rows, columns, dtype, storage["weight"].device)
        return only(MatmulKernel("widened", (self.name,), self._multiply), need)

    def _multiply(self, need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        if self.form.kind == "w8a8":
            x = quantize_rows(x, torch.int8).widen()
        return multiply_dense(need, x, {"weight": self.groups(storage).widen(x.dtype)}, bias)


def paired(codes: torch.Tensor) -> torch.Tensor:  # [..., columns] of -8 to 7 -> [..., columns / 2] uint8
    halves = (codes + 8).to(torch.uint8).view(*codes.shape[:-1], -1, 2, PAIRED // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)


def unpaired(packed: torch.Tensor) -> torch.Tensor:  # [..., columns / 2] uint8 -> [..., columns] int8
    halves = packed.view(*packed.shape[:-1], -1, PAIRED // 2)
    return (torch.stack([halves & 15, halves >> 4], dim=-2).to(torch.int8) - 8).flatten(-3)
