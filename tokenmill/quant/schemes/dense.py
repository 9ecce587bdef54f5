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
    """The weight as it is; every product goes through one kernel, whatever the number of rows."""

    name = "dense, batch-invariant"

    def __init__(self, out_dtype: torch.dtype | None = None) -> None:
        """out_dtype: of products on a GPU; by default that of the model."""
        super().__init__()
        self._out_dtype = out_dtype

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        storage = {"weight": torch.empty(rows, columns, dtype=dtype, device=device)}
        self.matmul(storage, dtype)  # refuses what has no such kernel before it is loaded
        return storage

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        return select_matmul(dense_need(storage["weight"], dtype, batch_invariant=True, out_dtype=self._out_dtype))
