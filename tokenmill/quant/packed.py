"""Packed: weights as a GGUF file stores them, in panels for the native CPU kernels; inputs are quantized to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.quant.scheme import QuantizedRows, Storage

if TYPE_CHECKING:
    from tokenmill.ops.native.matrix import Arena, PackedMatrix


@dataclass(frozen=True)
class Blocks:
    """A matrix in the blocks of a GGUF format."""

    raw: npt.NDArray[np.uint8]  # rows one after the other
    type_id: int
    shape: tuple[int, int]
    order: npt.NDArray[np.int32] | None = None  # row r is row order[r] of raw; None: as they come


class PackedStorage(dict[str, torch.Tensor]):
    """The panels of a matrix, as tensors, and what multiplies with them."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix


def can_pack(blocks: Blocks) -> bool:
    from tokenmill.ops.native.matrix import OF_GGUF

    form = OF_GGUF.get(blocks.type_id)
    return form is not None and blocks.shape[1] % form.values == 0


def packed_bytes(type_id: int, rows: int, columns: int) -> int:
    """Bytes of a matrix that can be packed."""
    from tokenmill.ops.native.matrix import OF_GGUF

    return OF_GGUF[type_id].nbytes(rows, columns)


class Packed:
    """Rows in the form they have in the file: 4, 5, 6 or 8 bits with scales, or 16- and 32-bit floats.

    Weights are represented exactly. Inputs of quantized rows are rounded to 8 bits in groups of 32 with a float32
    scale; floats are multiplied as they are. A row's result does not depend on the other rows, nor on how many
    threads there are.
    """

    name = "packed"

    def __init__(self) -> None:
        self._arena: Arena | None = None  # one for all matrices, which then lie in memory in the order they are read

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> PackedStorage:
        from tokenmill.ops.native.library import library
        from tokenmill.ops.native.matrix import Arena, PackedMatrix

        if self._arena is None:
            self._arena = Arena(library())
        return PackedStorage(PackedMatrix(rows, columns, self._arena))

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """An upper bound; what a file takes is known from its formats (see packed_bytes)."""
        return packed_bytes(0, rows, columns)

    def input_bytes(self, columns: int) -> int:
        return columns // 32 * 48 + columns * 4

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        return False

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        matrix = _matrix(storage)
        assert first_row == matrix.filled, "rows are packed in their order"
        matrix.append_floats(weight)
        self._show(storage)

    def write_blocks(self, storage: Storage, first_row: int, blocks: Blocks) -> None:
        from tokenmill.ops.native.matrix import OF_GGUF

        matrix = _matrix(storage)
        assert first_row == matrix.filled, "rows are packed in their order"
        matrix.append_blocks(blocks.raw, OF_GGUF[blocks.type_id], blocks.shape[0], blocks.order)
        self._show(storage)

    def matmul(self, x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        matrix = _matrix(storage)
        if x.dim() == 2:
            return matrix.matmul(x, bias)
        return matrix.matmul(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], matrix.rows)

    def take_rows(self, storage: Storage, ids: torch.Tensor) -> torch.Tensor:  # [n] -> [n, in]
        """Some rows as floats: an embedding that is packed, too."""
        return _matrix(storage).take_rows(ids)

    def _show(self, storage: Storage) -> None:
        """The tensors of a storage are what the memory accounting looks at."""
        for number, (form, _, panels) in enumerate(_matrix(storage).segments):
            storage[f"{number} {form.name}"] = panels


def _matrix(storage: Storage) -> PackedMatrix:
    assert isinstance(storage, PackedStorage)
    return storage.matrix
