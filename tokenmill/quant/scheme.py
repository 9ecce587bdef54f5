"""QuantScheme: who owns the storage of a linear layer's weight and computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

Storage = dict[str, torch.Tensor]


class QuantScheme(Protocol):
    """How a [out, in] matrix is stored and multiplied.

    A scheme holds no tensors: it allocates a storage, which the linear layer then owns and passes back.
    Rows arrive in any order while loading, each exactly once; `matmul` is called only when all have arrived.
    """

    name: str

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage: ...

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        """Store weight [n, in] as rows first_row, ..., converting it to the storage's own form and device."""
        ...

    def matmul(
        self,
        x: torch.Tensor,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        ...


class Dense:
    """The weight as it is, in the model's dtype."""

    name = "dense"

    def allocate(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Storage:
        return {"weight": torch.empty(rows, columns, dtype=dtype, device=device)}

    def write(self, storage: Storage, first_row: int, weight: torch.Tensor) -> None:
        storage["weight"][first_row : first_row + weight.shape[0]].copy_(weight)

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, storage["weight"], bias)


@dataclass(frozen=True)
class Linear:
    """A linear layer: a scheme, its storage, and a bias in the model's dtype."""

    scheme: QuantScheme
    storage: Storage
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.matmul(x, self.storage, self.bias)
