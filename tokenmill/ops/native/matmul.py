"""Products of packed weights by the native CPU library."""

from __future__ import annotations

import torch

from tokenmill.ops.matmul import MatmulKernel, MatmulNeed
from tokenmill.ops.native.matrix import PackedMatrix
from tokenmill.ops.types import Storage


class PackedStorage(Storage):
    """The panels of a matrix, as tensors, and what multiplies with them."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix


def _packed(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(storage, PackedStorage)
    return storage.matrix.matmul(x, bias)


KERNELS = (
    MatmulKernel(
        "native", ("packed",), _packed, devices=("cpu",), dtypes=(torch.float32,), recordable=("cpu",),
        batch_invariant=True, rank=10,
    ),
)  # fmt: skip
