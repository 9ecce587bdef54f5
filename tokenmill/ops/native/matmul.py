"""Products of packed weights by the native CPU library."""

from __future__ import annotations

import torch

from tokenmill.ops.matmul import MatmulKernel, MatmulNeed
from tokenmill.ops.native.elementwise import add
from tokenmill.ops.native.matrix import PackedMatrix
from tokenmill.ops.types import Storage


class PackedStorage(Storage):
    """The panels of a matrix, as tensors, and what multiplies with them. Of several, each is a slice of the columns."""

    def __init__(self, *matrices: PackedMatrix) -> None:
        super().__init__()
        self.matrices = matrices

    @property
    def matrix(self) -> PackedMatrix:
        """The only one."""
        (only,) = self.matrices
        return only


def _sliced(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    """Sums are taken of each slice alone, and then by pairs."""
    assert isinstance(storage, PackedStorage)
    columns = torch.split(x, need.in_features // len(storage.matrices), dim=1)
    biases = [bias, *[None] * (len(columns) - 1)]  # the first rank's, as that of torch's slices
    parts = [one.matmul(x, bias) for one, x, bias in zip(storage.matrices, columns, biases, strict=True)]
    while len(parts) > 1:
        parts = [add(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _packed(need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(storage, PackedStorage)
    return storage.matrix.matmul(x, bias)


KERNELS = (
    MatmulKernel(
        "native", ("packed",), _packed, devices=("cpu",), dtypes=(torch.float32,), recordable=("cpu",),
        batch_invariant=True, rank=10,
    ),
    MatmulKernel(
        "native, in slices", ("packed slices",), _sliced, devices=("cpu",), dtypes=(torch.float32,),
        recordable=("cpu",), batch_invariant=True, rank=10,
    ),
)  # fmt: skip
