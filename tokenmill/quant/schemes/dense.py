"""Dense weights: as they are, and with products that give a row the same bits in any batch."""

from __future__ import annotations

import torch

from tokenmill.ops.matmul import Matmul, dense_need, select_matmul
from tokenmill.ops.types import Storage
from tokenmill.quant.schemes.scheme import QuantScheme, counters_beside


class Dense(QuantScheme):
    """The weight as it is, in the model's dtype or in one of its own, in which it is then multiplied."""

    name = "dense"
    floats = True

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        if dtype is not None:
            self.name = f"dense {str(dtype).removeprefix('torch.')}"

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        weight = torch.empty(rows, columns, dtype=self.dtype or dtype, device=device)
        return {"weight": weight, **counters_beside(dense_need(weight, dtype))}

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return rows * columns * (self.dtype or dtype).itemsize

    def input_bytes(self, columns: int) -> int:
        return 0 if self.dtype is None else columns * self.dtype.itemsize

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        storage["weight"][first_row : first_row + weight.shape[0]].copy_(weight)

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        return select_matmul(dense_need(storage["weight"], dtype))


class InvariantDense(Dense):
    """The weight as it is; every product goes through one kernel, whatever the number of rows.

    Where ranks may divide the columns, their products are computed in slices, each of which is stored by itself.
    """

    name = "dense, batch-invariant"
    batch_invariant = True

    def __init__(self, out_dtype: torch.dtype | None = None, slices: int = 1) -> None:
        """out_dtype: of products on a GPU; by default that of the model."""
        super().__init__()
        self._out_dtype, self._slices = out_dtype, slices

    def of_head(self) -> InvariantDense:
        """Logits in float32: of equal ones, which is ranked first could depend on the batch."""
        return InvariantDense(torch.float32)

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        shape = (rows, columns) if self._slices == 1 else (self._slices, rows, columns // self._slices)
        storage = {"weight": torch.empty(shape, dtype=dtype, device=device)}
        self.matmul(storage, dtype)  # refuses what has no such kernel before it is loaded
        return storage

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        if self._slices == 1:
            super().write(storage, first_row, weight)
            return
        parts = weight.reshape(len(weight), self._slices, -1).transpose(0, 1)
        storage["weight"][:, first_row : first_row + len(weight)].copy_(parts)

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        weight = storage["weight"]
        whole = weight if weight.dim() == 2 else weight.view(weight.shape[1], -1)  # of the shape of the whole
        return select_matmul(dense_need(whole, dtype, batch_invariant=True, out_dtype=self._out_dtype))
