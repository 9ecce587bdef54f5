"""WeightOnly: weights of four or eight bits with scales per row or per group; inputs are multiplied as they are."""

from __future__ import annotations

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.matmul import Matmul, MatmulNeed, select_matmul
from tokenmill.ops.types import Storage
from tokenmill.ops.weight_words import FLOAT8, PARTS, TILE, is_tiled, pack, rows_of, unpack, write_rows
from tokenmill.quant.forms import GROUPS, WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.schemes.scheme import QuantScheme, counters_beside

_CHUNK = 1 << 24  # elements rounded at once while loading, so that the wide copy stays small


def why_not(rows: int, columns: int, form: WeightForm) -> str | None:
    """Why a [rows, columns] matrix cannot have this form, and what to do instead; None: it can."""
    if form.group is not None and columns % form.group:
        fitting = [f"g{size}" for size in GROUPS if columns % size == 0]
        instead = f"{form.kind}-{fitting[-1]}" if fitting and form.kind == "int4" else "int8"
        return f"its {columns} inputs are no multiple of {form.group}, which share a scale; take {instead}"
    if columns % PARTS[form.kind]:
        return f"its {columns} inputs do not fill whole words of {PARTS[form.kind]} weights; leave it as it is (bf16)"
    return None


class WeightOnly(QuantScheme):
    """int4 in groups (with zeros or without), int8 per row or in groups, float8 in groups.

    On a GPU, few rows are multiplied with codes that become floats in registers; for many rows the whole weight is
    widened into a scratch for the matrix library. Elsewhere the weight is widened for each product: slow, exact.

    Codes are stored as 16-bit words, in tiles where rows and columns fill them (ops/weight_words.py).
    """

    def __init__(self, form: WeightForm) -> None:
        if form.kind not in PARTS or (form.kind == "int4" and form.group is None):
            raise ConfigError(f"{form.name} is not a weight-only form; there are int4-g32, -g64, -g128 and int8")
        self.form = form
        self.name = form.name

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        if reason := why_not(rows, columns, self.form):
            raise ConfigError(f"quantization: a layer of {rows} x {columns} cannot be {self.name}: {reason}")
        groups = columns // self._group(columns)
        tiled = is_tiled(rows, columns, self.form.kind)
        words = columns // self._parts
        weight_shape = (rows // TILE, words // TILE, TILE**2) if tiled else (rows, words)
        group_shape = (rows // TILE, groups, TILE) if tiled else (rows, groups)
        storage = {
            "weight": torch.empty(weight_shape, dtype=torch.int16, device=device),
            "scale": torch.empty(group_shape, dtype=torch.float32, device=device),
            **counters_beside(self._need(rows, columns, groups, dtype, device)),
        }
        if self.form.zeros:
            storage["zeros"] = torch.empty(group_shape, dtype=torch.int8, device=device)
        return storage

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        group_bytes = 5 if self.form.zeros else 4
        return rows * (columns // self._parts * 2 + columns // self._group(columns) * group_bytes)

    def scratch_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes of the widened weight that a product of many rows needs while it runs."""
        return rows * columns * dtype.itemsize

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        step = max(1, _CHUNK // max(weight.shape[1], 1))
        for part in torch.split(weight, step):
            self.write_groups(storage, first_row, round_to_nearest(part.to(storage["weight"].device), self.form))
            first_row += part.shape[0]

    @property
    def whole_rows(self) -> bool:
        return self.form.group is None

    def rounded(self, weight: torch.Tensor) -> Groups:  # [n, in]
        return round_to_nearest(weight, self.form)

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None:
        """Store codes as they are. Scales may be coarser than the form's: then several groups get the same."""
        bits = 4 if self.form.kind == "int4" else 8
        if groups.bits != bits or (groups.codes.dtype == FLOAT8) != (self.form.kind == "fp8"):
            raise ConfigError(f"a layer of the checkpoint has {groups.bits}-bit codes, which cannot become {self.name}")
        if groups.zeros is not None and not self.form.zeros:
            raise ConfigError(f"a layer of the checkpoint has zeros, which {self.name} has no place for")
        rows = torch.arange(first_row, first_row + groups.codes.shape[0], device=storage["weight"].device)
        write_rows(storage["weight"], rows, pack(groups.codes.to(rows.device), self.form.kind))
        per_row = storage["scale"].shape[1]
        write_rows(storage["scale"], rows, _repeated(groups.scale, per_row))
        if self.form.zeros:
            zeros = groups.zeros if groups.zeros is not None else torch.zeros(groups.scale.shape, dtype=torch.int8)
            write_rows(storage["zeros"], rows, _repeated(zeros, per_row))

    def groups(self, storage: Storage) -> Groups:
        """What is stored, in the neutral form."""
        weight, scale = (rows_of(storage[name]) for name in ("weight", "scale"))
        zeros = rows_of(storage["zeros"]) if self.form.zeros else None
        return Groups(unpack(weight, self.form.kind), scale, 4 if self.form.kind == "int4" else 8, zeros)

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        words, scale = storage["weight"], storage["scale"]
        if words.dim() == 3:
            rows, columns = words.shape[0] * TILE, words.shape[1] * TILE * self._parts
        else:
            rows, columns = words.shape[0], words.shape[1] * self._parts
        return select_matmul(self._need(rows, columns, scale.shape[1], dtype, words.device))

    def _need(self, rows: int, columns: int, groups: int, dtype: torch.dtype, device: torch.device) -> MatmulNeed:
        return MatmulNeed(
            "grouped fp8" if self.form.kind == "fp8" else self.form.kind,
            rows,
            columns,
            dtype,
            device,
            group=columns // groups if groups > 1 else 0,
            zeros=self.form.zeros,
            tiled=is_tiled(rows, columns, self.form.kind),
        )

    @property
    def _parts(self) -> int:
        return PARTS[self.form.kind]

    def _group(self, columns: int) -> int:
        return self.form.group or columns


def _repeated(values: torch.Tensor, groups: int) -> torch.Tensor:  # [n, some] -> [n, groups]
    if groups % values.shape[1]:
        raise ConfigError(
            f"a layer of the checkpoint has {values.shape[1]} scales a row, and {groups} are to be stored; "
            "leave quantization unset to keep what it has"
        )
    return values.repeat_interleave(groups // values.shape[1], dim=1)
