"""Packed: weights in panels for the native CPU kernels, as a file stores them or rounded; inputs become 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.ops.matmul import Matmul, MatmulNeed, select_matmul
from tokenmill.ops.native.arena import Arena
from tokenmill.ops.native.blocks import rounded
from tokenmill.ops.native.experts import PackedExperts
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.library import library
from tokenmill.ops.native.matmul import PackedStorage
from tokenmill.ops.native.matrix import OF_DTYPE, PackedMatrix
from tokenmill.ops.types import Storage
from tokenmill.quant.forms import FLOATS, WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.rounding import GRIDS
from tokenmill.quant.schemes.scheme import QuantScheme

BLOCK = 32  # columns of a block of small numbers
F32, Q4_0, Q4_1, Q8_0 = 0, 2, 3, 8  # as GGUF numbers its types


@dataclass(frozen=True)
class Blocks:
    """A matrix in the blocks of a GGUF format."""

    raw: npt.NDArray[np.uint8]  # rows one after the other
    type_id: int
    shape: tuple[int, int]
    order: npt.NDArray[np.int32] | None = None  # row r is row order[r] of raw; None: as they come

    def cut(self, rows: range, columns: range) -> Blocks | None:
        """Some rows and columns of it; None: columns end within a block."""
        format, width = OF_GGUF[self.type_id], self.shape[1]
        if columns.start % format.values or columns.stop % format.values:
            return None
        by_row = self.raw.reshape(self.shape[0], width // format.values, format.size)
        order = None if self.order is None else self.order[rows.start : rows.stop]
        first, last = (rows.start, rows.stop) if order is None else (int(order.min()), int(order.max()) + 1)
        if last - first == len(rows):  # rows of heads are in another order among themselves
            order = None if order is None else order - np.int32(first)
            some = by_row[first:last]
        else:
            some, order = by_row[order], None
        some = some[:, columns.start // format.values : columns.stop // format.values]
        return Blocks(np.ascontiguousarray(some).reshape(-1), self.type_id, (len(rows), len(columns)), order)


def can_pack(blocks: Blocks) -> bool:
    format = OF_GGUF.get(blocks.type_id)
    return format is not None and blocks.shape[1] % format.values == 0


def packed_bytes(type_id: int, rows: int, columns: int) -> int:
    """Bytes of a matrix that can be packed."""
    return OF_GGUF[type_id].form.nbytes(rows, columns)


def float_bytes(dtype: torch.dtype | None, rows: int, columns: int) -> int:
    """Bytes of a matrix of floats that is packed; None: of a type that is not known, and not wider than float32."""
    return OF_DTYPE.get(dtype or torch.float32, OF_DTYPE[torch.float32]).form.nbytes(rows, columns)


class Packed(QuantScheme):
    """Rows in the form they have in the file: 4, 5, 6 or 8 bits with scales, or 16- and 32-bit floats.

    With a form, floats are rounded to it as they are written; else weights are represented exactly. Inputs of
    quantized rows are rounded to 8 bits in groups of 32 with a float32 scale; floats are multiplied as they are. A
    row's result does not depend on the other rows, nor on how many threads there are.
    """

    name = "packed"
    stores_embeddings = True
    in_one_part = True
    batch_invariant = True
    experts_op = "moe_packed"
    kv_dtype: torch.dtype | None = torch.float16  # half the bytes to read, and far finer than the packed weights

    def __init__(self, form: WeightForm | None = None, beside: Packed | None = None) -> None:
        """beside: the matrices of both lie in memory in the order they are read."""
        self.form = form
        self._shared: list[Arena] = [] if beside is None else beside._shared  # one arena, made when it is needed
        if form is not None:
            self.name = f"packed {form.name}"
        self.as_in_file = form is None

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> PackedStorage:
        if not self._shared:
            self._shared.append(Arena(library()))
        return PackedStorage(PackedMatrix(rows, columns, self._shared[0]))

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Without a form an upper bound; what a file takes is known from its formats (see packed_bytes)."""
        if self.form is not None and self.form.kind in FLOATS:
            return float_bytes(getattr(torch, FLOATS[self.form.kind]), rows, columns)
        if self.form is None or columns % BLOCK:
            return float_bytes(None, rows, columns)
        return packed_bytes(_block_type(8 if self.form.kind != "int4" else 4, self.form.zeros), rows, columns)

    def input_bytes(self, columns: int) -> int:
        return columns // 32 * (48 + 48) + columns * 4  # blocks, room for outliers, floats for dense parts (formats.h)

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        form = self.form
        if form is not None and form.kind in FLOATS:
            weight = weight.to(getattr(torch, FLOATS[form.kind]))
        elif form is not None and weight.shape[1] % (form.group or BLOCK) == 0:
            # A scale per block takes no more room than one per row would: every block has its own in any case.
            kind = _block_type(GRIDS[form.kind].bits, form.zeros)
            raw = rounded(library(), weight, OF_GGUF[kind], form.group or BLOCK)
            rows, columns = weight.shape
            self.write_blocks(storage, first_row, Blocks(raw, kind, (rows, columns)))
            return
        matrix = _matrix(storage)
        assert first_row == matrix.filled, "rows are packed in their order"
        matrix.append_floats(weight)
        self.show(storage)

    def write_groups(self, storage: Storage, first_row: int, groups: Groups) -> None:
        """Codes are kept; scales are rounded to float16, which is all that blocks hold."""
        self.write_blocks(storage, first_row, blocks_of(groups))

    def write_blocks(self, storage: Storage, first_row: int, blocks: Blocks) -> None:
        matrix = _matrix(storage)
        assert first_row == matrix.filled, "rows are packed in their order"
        matrix.append_blocks(blocks.raw, OF_GGUF[blocks.type_id], blocks.shape[0], blocks.order)
        self.show(storage)

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        matrix = _matrix(storage)
        return select_matmul(MatmulNeed("packed", matrix.rows, matrix.columns, dtype, torch.device("cpu")))

    def stack(self, storages: Sequence[Storage]) -> PackedExperts:
        return PackedExperts([_matrix(one) for one in storages])

    def take_rows(self, storage: Storage, ids: torch.Tensor, first: int = 0) -> torch.Tensor:  # [n] -> [n, in]
        """Some rows as floats: an embedding that is packed, too."""
        return _matrix(storage).take_rows(ids, first)

    def show(self, storage: Storage) -> None:
        """The tensors of a storage are what the memory accounting looks at."""
        for number, (form, _, panels) in enumerate(_matrix(storage).segments):
            storage[f"{number} {form.name}"] = panels


class PackedSlices(QuantScheme):
    """Floats as they were saved, each of some slices of the columns packed for itself.

    Sums over the columns are taken of every slice, and added by pairs: ranks that divide the slices get the same bits.
    """

    name = "packed, in slices"
    in_one_part = True
    batch_invariant = True
    kv_dtype: torch.dtype | None = None

    def __init__(self, slices: int, beside: Packed) -> None:
        """beside: the matrices of both lie in memory in the order they are read."""
        self._slices, self._beside = slices, beside

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> PackedStorage:
        parts = (self._beside.allocate(rows, columns // self._slices, dtype, device) for _ in range(self._slices))
        return PackedStorage(*map(_matrix, parts))

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return self._slices * float_bytes(None, rows, columns // self._slices)

    def input_bytes(self, columns: int) -> int:
        return columns * 4

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        assert isinstance(storage, PackedStorage)
        for matrix, part in zip(storage.matrices, weight.chunk(self._slices, dim=1), strict=True):
            assert first_row == matrix.filled, "rows are packed in their order"
            matrix.append_floats(part)
        self.show(storage)

    def show(self, storage: Storage) -> None:
        """As that of a Packed."""
        assert isinstance(storage, PackedStorage)
        for number, matrix in enumerate(storage.matrices):
            for place, (form, _, panels) in enumerate(matrix.segments):
                storage[f"{number} {place} {form.name}"] = panels

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        assert isinstance(storage, PackedStorage)
        rows, columns = storage.matrices[0].rows, sum(one.columns for one in storage.matrices)
        return select_matmul(MatmulNeed("packed slices", rows, columns, dtype, torch.device("cpu")))


def can_hold(groups_of: WeightForm, columns: int) -> bool:
    """Whether blocks can hold what a checkpoint stores in this form."""
    group = groups_of.group or columns
    return groups_of.kind in ("int4", "int8", "w8a8") and group % BLOCK == 0 and columns % group == 0


def blocks_of(groups: Groups) -> Blocks:
    """The same codes as blocks of 32 columns, each with its own copy of its group's scale."""
    rows, columns = groups.codes.shape
    codes = groups.codes.numpy().reshape(rows, -1, BLOCK)
    scale = _per_block(groups.scale.float(), groups)  # [rows, blocks, 1]
    kind = _block_type(groups.bits, groups.zeros is not None)
    if kind == Q8_0 and groups.zeros is not None:
        return Blocks(_bytes(groups.widen(torch.float32).numpy()).reshape(-1), F32, (rows, columns))
    fields = [_bytes(scale.astype(np.float16))]
    if kind == Q4_1:
        assert groups.zeros is not None
        lowest = -(_per_block(groups.zeros.float(), groups) + 8) * scale  # what the code 0 of 0..15 stands for
        fields.append(_bytes(lowest.astype(np.float16)))
    if groups.bits == 4:
        low, high = np.split((codes + 8).astype(np.uint8), 2, axis=2)  # [rows, blocks, 16] each
        codes = low | high << 4
    fields.append(_bytes(codes))
    return Blocks(np.concatenate(fields, axis=2).reshape(-1), kind, (rows, columns))


def _block_type(bits: int, zeros: bool) -> int:
    return Q8_0 if bits == 8 else Q4_1 if zeros else Q4_0


def _per_block(values: torch.Tensor, groups: Groups) -> npt.NDArray[np.float32]:  # [rows, groups] -> [rows, blocks, 1]
    return values.numpy().repeat(groups.group // BLOCK, axis=1)[..., None]


def _bytes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:  # of the last dimension
    return np.ascontiguousarray(values).view(np.uint8)


def _matrix(storage: Storage) -> PackedMatrix:
    assert isinstance(storage, PackedStorage)
    return storage.matrix
