"""Parts: the tensors that make up one quantized matrix, each checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tokenmill.errors import ModelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Parts:
    module: str  # "model.layers.0.mlp.down_proj"
    names: Mapping[str, str]  # "weight_scale" -> the tensor's name in the file
    read: Callable[[str], torch.Tensor]
    wanted: tuple[int, ...] | None  # the matrix's shape, as config.json implies it

    def has(self, part: str) -> bool:
        return part in self.names

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> torch.Tensor:
        """A part, if it is of one of these types and has one of these shapes (none: two dimensions)."""
        if part not in self.names:
            raise ModelError(f"the checkpoint lacks {f'{self.module}.{part}'!r}; it is incomplete: download it again")
        tensor = self.read(self.names[part])
        if tensor.dtype not in dtypes:
            allowed = " or ".join(_plain(dtype) for dtype in dtypes)
            raise ModelError(f"tensor {self.names[part]!r} is of type {_plain(tensor.dtype)}; it must be {allowed}")
        if (tuple(tensor.shape) not in shapes) if shapes else (tensor.dim() != 2):
            wanted = " or ".join(str(list(shape)) for shape in shapes) or "two dimensions"
            raise ModelError(
                f"tensor {self.names[part]!r} has shape {list(tensor.shape)} where {wanted} is needed;"
                " the file is damaged, or config.json belongs to other weights"
            )
        return tensor

    def check(self, rows: int, columns: int) -> tuple[int, int]:
        """The matrix's shape, if it is the one that config.json implies."""
        if self.wanted not in (None, (rows, columns)) or min(rows, columns) < 1:
            raise ModelError(
                f"the quantized matrix {self.module!r} has shape {[rows, columns]} but config.json implies"
                f" {list(self.wanted or ())}; check that config.json belongs to these weights"
            )
        return rows, columns

    def group_of(self, part: str, columns: int, groups: int, group: int) -> torch.Tensor | None:  # [columns] int64
        """Each column's group; None: they are one after the other, or the tensor says nothing (it holds only -1)."""
        if not self.has(part):
            return None
        where = self.take(part, INTEGERS, (columns,)).long()
        if bool((where == -1).all()) or torch.equal(where, torch.arange(columns) // group):
            return None
        if int(where.min()) < 0 or int(where.max()) >= groups:
            raise ModelError(
                f"tensor {self.names[part]!r} names groups {int(where.min())} to {int(where.max())}, but there are"
                f" {groups}; the file is damaged: download it again"
            )
        return where


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
