"""Dense weights whose products give a row the same bits in any batch."""

from __future__ import annotations

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops import invariant
from tokenmill.quant.schemes.scheme import Dense, QuantizedRows, Storage


class InvariantDense:
    """The weight as it is; every product goes through one kernel, whatever the number of rows."""

    name = "dense, batch-invariant"

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """dtype: of products on a GPU; by default that of the model."""
        self._dtype = dtype
        self._dense = Dense()

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        if device.type == "cuda":
            from tokenmill.ops.triton.gemm_invariant import ALIGNMENT

            if columns * dtype.itemsize % ALIGNMENT:
                raise ConfigError(
                    f"batch_invariant is set, but this model has a linear layer with {columns} inputs, and on a GPU "
                    f"rows of weights must be multiples of {ALIGNMENT} bytes; leave it out"
                )
        return {"weight": torch.empty(rows, columns, dtype=dtype, device=device)}

    def nbytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        return self._dense.nbytes(rows, columns, dtype)

    def input_bytes(self, columns: int) -> int:
        return 0

    def wants_quantized(self, storage: Storage, rows: int, dtype: torch.dtype) -> bool:
        return False

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        self._dense.write(storage, first_row, weight)

    def matmul(self, x: torch.Tensor | QuantizedRows, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)  # `wants_quantized` said no
        weight = storage["weight"]
        rows = x.reshape(-1, x.shape[-1])
        if x.device.type == "cpu":
            out = invariant.linear(rows, weight, bias)
        else:
            from tokenmill.ops.triton.gemm_invariant import invariant_gemm

            out = invariant_gemm(rows, weight, bias, dtype=self._dtype)
        return out.view(*x.shape[:-1], weight.shape[0])
