"""WeightOnly: weights of four or eight bits with scales per row or per group; inputs are multiplied as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tokenmill.errors import ConfigError
from tokenmill.ops.types import Unnormed
from tokenmill.quant.forms import GROUPS, Form
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import round_to_nearest
from tokenmill.quant.schemes.device import arrivals_for, has_small_gemm
from tokenmill.quant.schemes.scheme import QuantizedRows, Storage

if TYPE_CHECKING:
    from tokenmill.ops.triton.weight_codes import Codes

FLOAT8 = torch.float8_e4m3fn
PARTS = {"int4": 4, "int8": 2, "fp8": 2}  # codes in a 16-bit word
TILE = 16  # rows, and words of each of them, that lie together
_BITS = 16
_OFFSET = 8  # what is added to a code of four bits, so that it is not negative
_CHUNK = 1 << 24  # elements rounded at once while loading, so that the wide copy stays small


def why_not(rows: int, columns: int, form: Form) -> str | None:
    """Why a [rows, columns] matrix cannot have this form, and what to do instead; None: it can."""
    if form.group is not None and columns % form.group:
        fitting = [f"g{size}" for size in GROUPS if columns % size == 0]
        instead = f"{form.kind}-{fitting[-1]}" if fitting and form.kind == "int4" else "int8"
        return f"its {columns} inputs are no multiple of {form.group}, which share a scale; take {instead}"
    if columns % PARTS[form.kind]:
        return f"its {columns} inputs do not fill whole words of {PARTS[form.kind]} weights; leave it as it is (bf16)"
    return None


class WeightOnly:
    """int4 in groups (with zeros or without), int8 per row or in groups, float8 in groups.

    On a GPU, few rows are multiplied with codes that become floats in registers; for many rows the whole weight is
    widened into a scratch for the matrix library. Elsewhere the weight is widened for each product: slow, exact.

    Codes are stored as 16-bit words. Where rows and columns fill whole tiles, tiles of 16 rows and 16 words lie in the
    order in which the tensor cores take them (ops/triton/weight_codes.py): weight [bands, tiles, 256], scale and zeros
    [bands, groups, 16]. Other matrices, which are rare, lie in plain order and are widened for each product: weight
    [rows, words], scale and zeros [rows, groups].
    """

    def __init__(self, form: Form) -> None:
        if form.kind not in PARTS or (form.kind == "int4" and form.group is None):
            raise ConfigError(f"{form.name} is not a weight-only form; there are int4-g32, -g64, -g128 and int8")
        self.form = form
        self.name = form.name

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        if reason := why_not(rows, columns, self.form):
            raise ConfigError(f"quantization: a layer of {rows} x {columns} cannot be {self.name}: {reason}")
        groups = columns // self._group(columns)
        tiled = self._tiled(rows, columns)
        words = columns // self._parts
        weight_shape = (rows // TILE, words // TILE, TILE**2) if tiled else (rows, words)
        group_shape = (rows // TILE, groups, TILE) if tiled else (rows, groups)
        storage = {
            "weight": torch.empty(weight_shape, dtype=torch.int16, device=device),
            "scale": torch.empty(group_shape, dtype=torch.float32, device=device),
            **arrivals_for(rows, device),
        }
        if self.form.zeros:
            storage["zeros"] = torch.empty(group_shape, dtype=torch.int8, device=device)
        return storage

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        group_bytes = 5 if self.form.zeros else 4
        return rows * (columns // self._parts * 2 + columns // self._group(columns) * group_bytes)

    def input_bytes(self, columns: int) -> int:
        return 0

    def scratch_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Bytes of the widened weight that a product of many rows needs while it runs."""
        return rows * columns * dtype.itemsize

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        return False

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        step = max(1, _CHUNK // max(weight.shape[1], 1))
        for part in torch.split(weight, step):
            self.write_groups(storage, first_row, round_to_nearest(part.to(storage["weight"].device), self.form))
            first_row += part.shape[0]

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None:
        """Store codes as they are. Scales may be coarser than the form's: then several groups get the same."""
        bits = 4 if self.form.kind == "int4" else 8
        if groups.bits != bits or (groups.codes.dtype == FLOAT8) != (self.form.kind == "fp8"):
            raise ConfigError(f"a layer of the checkpoint has {groups.bits}-bit codes, which cannot become {self.name}")
        if groups.zeros is not None and not self.form.zeros:
            raise ConfigError(f"a layer of the checkpoint has zeros, which {self.name} has no place for")
        rows = torch.arange(first_row, first_row + groups.codes.shape[0], device=storage["weight"].device)
        _write(_by_rows(storage["weight"]), rows, self._pack(groups.codes.to(rows.device)))
        scale = _by_rows(storage["scale"])
        _write(scale, rows, _repeated(groups.scale, scale.shape[-1]))
        if self.form.zeros:
            zeros = groups.zeros if groups.zeros is not None else torch.zeros(groups.scale.shape, dtype=torch.int8)
            _write(_by_rows(storage["zeros"]), rows, _repeated(zeros, scale.shape[-1]))

    def groups(self, storage: Storage) -> Groups:
        """What is stored, in the neutral form."""
        weight, scale = (_rows_of(storage[name]) for name in ("weight", "scale"))
        zeros = _rows_of(storage["zeros"]) if self.form.zeros else None
        return Groups(self._unpack(weight), scale, 4 if self.form.kind == "int4" else 8, zeros)

    def matmul(
        self,
        x: torch.Tensor | QuantizedRows,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        if isinstance(x, QuantizedRows):
            x = x.widen()
        plain = x.dtype not in (torch.bfloat16, torch.float16) or storage["weight"].dim() == 2
        if plain or not has_small_gemm(x.device):
            return F.linear(x, self.groups(storage).widen(x.dtype), bias)
        from tokenmill.ops.triton import gemm_weight_only as kernels

        rows = x if x.dim() == 2 else x.flatten(0, -2)
        if rows.shape[0] == 1 and self.fuses(storage, x.dtype):
            return self.fused(rows.contiguous(), storage, bias).view(*x.shape[:-1], -1)
        codes = self._codes(storage)
        if rows.shape[0] > kernels.most_rows(codes) or rows.shape[0] == 0:
            return F.linear(x, kernels.widened(codes, x.dtype), bias)
        out = kernels.weight_only_gemm(rows, codes, bias, arrivals=storage["arrivals"])
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)

    def fuses(self, storage: Storage, dtype: torch.dtype, gated: bool = False) -> bool:
        """Whether one row has a kernel of its own, which norms its input and (gated) gates its result on the way."""
        if storage["weight"].dim() == 2 or not has_small_gemm(storage["weight"].device):
            return False
        from tokenmill.ops.triton.versions import ONE_ROW, usable

        if not usable(ONE_ROW, storage["weight"].device):
            return False
        from tokenmill.ops.triton.gemm_one_row import takes

        return takes(self._codes(storage), dtype, gated)

    def fused(
        self, x: torch.Tensor | Unnormed, storage: Storage, bias: torch.Tensor | None, act: str = ""
    ) -> torch.Tensor:
        from tokenmill.ops.triton.gemm_one_row import one_row_gemm

        return one_row_gemm(x, self._codes(storage), bias, act)

    def _codes(self, storage: Storage) -> Codes:
        from tokenmill.ops.triton.weight_codes import Codes

        return Codes(storage["weight"], storage["scale"], storage.get("zeros"), self.form.kind)

    @property
    def _parts(self) -> int:
        return PARTS[self.form.kind]

    def _group(self, columns: int) -> int:
        return self.form.group or columns

    def _run(self, columns: int) -> int:
        """How far apart the columns of a word lie."""
        return TILE if columns % (TILE * self._parts) == 0 else 1

    def _tiled(self, rows: int, columns: int) -> bool:
        return rows % TILE == 0 and self._run(columns) == TILE

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:  # [n, columns] -> [n, columns / parts] int16
        bits = _BITS // self._parts
        # Wrapped into whole numbers that are not negative; 8-bit codes keep their bytes.
        small = (codes + _OFFSET) if bits == 4 else codes
        small = small.view(torch.uint8).view(codes.shape[0], -1, self._parts, self._run(codes.shape[1]))
        words = torch.zeros(small.shape[0], small.shape[1], small.shape[3], dtype=torch.int32, device=codes.device)
        for part in range(self._parts):
            words |= small[:, :, part].int() << (bits * part)
        return words.flatten(1).to(torch.int16)

    def _unpack(self, words: torch.Tensor) -> torch.Tensor:  # [n, columns / parts] int16 -> [n, columns]
        bits = _BITS // self._parts
        columns = words.shape[1] * self._parts
        wide = words.view(words.shape[0], -1, 1, self._run(columns)).int()
        shifts = torch.arange(0, _BITS, bits, dtype=torch.int32, device=words.device)
        small = ((wide >> shifts[:, None]) & ((1 << bits) - 1)).flatten(1)  # [n, blocks, parts, run] -> [n, columns]
        if bits == 4:
            return (small - _OFFSET).to(torch.int8)
        return small.to(torch.uint8).view(FLOAT8 if self.form.kind == "fp8" else torch.int8)


def _by_rows(stored: torch.Tensor) -> torch.Tensor:
    """A view of words, scales or zeros that begins with the dimensions of a row: [rows] or [bands, 2, 8]."""
    if stored.dim() == 2:
        return stored
    if stored.shape[2] == TILE:  # [bands, groups, (g, high)]
        return stored.view(*stored.shape[:2], 8, 2).permute(0, 3, 2, 1)
    lanes = stored.view(*stored.shape[:2], 8, 4, 2, 2, 2)  # bands, tiles, g, t, k_high, high, k_low
    return lanes.permute(0, 5, 2, 1, 4, 3, 6)


def _rows_of(stored: torch.Tensor) -> torch.Tensor:  # [rows, words or groups]
    return stored if stored.dim() == 2 else _by_rows(stored).flatten(0, 2).flatten(1)


def _write(by_rows: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:  # [n], [n, words or groups]
    if by_rows.dim() == 2:
        by_rows[rows] = values.to(by_rows)
    else:
        by_rows[rows // TILE, rows % TILE // 8, rows % 8] = values.to(by_rows).view(-1, *by_rows.shape[3:])


def _repeated(values: torch.Tensor, groups: int) -> torch.Tensor:  # [n, some] -> [n, groups]
    if groups % values.shape[1]:
        raise ConfigError(
            f"a layer of the checkpoint has {values.shape[1]} scales a row, and {groups} are to be stored; "
            "leave quantization unset to keep what it has"
        )
    return values.repeat_interleave(groups // values.shape[1], dim=1)
