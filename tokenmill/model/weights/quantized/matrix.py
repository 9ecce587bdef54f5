"""A quantized matrix: what its file says about it before it is read, and its codes and scales in their plain order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.quant.forms import GROUPS, WeightForm
from tokenmill.quant.groups import Groups


@dataclass(frozen=True)
class MatrixFormat:
    """How a [rows, columns] matrix is stored; known without reading it."""

    shape: tuple[int, int]
    bits: int  # 4 or 8
    group: int  # columns that share a scale; the last group may have fewer
    floating: bool = False  # codes are float8, not integers
    zeros: bool = False
    shuffled: bool = False  # the columns of a group are not beside each other
    inputs: str | None = None  # as in Groups

    @property
    def fine(self) -> int | None:
        """The largest size of Groups in which no two columns have different scales; None: there is none."""
        for size in sorted(GROUPS, reverse=True):
            if self.shape[1] % size == 0 and (self.by_row or self.group % size == 0):
                return size
        return None

    @property
    def by_row(self) -> bool:
        return self.group >= self.shape[1]

    @property
    def form(self) -> WeightForm | None:
        """The form in which it can be kept; None: as floats only."""
        if self.shuffled or (self.bits == 8 and self.zeros):
            return None
        if self.bits == 8 and self.by_row and (self.inputs is not None or not self.floating):
            return WeightForm("fp8" if self.floating else "int8" if self.inputs is None else "w8a8")
        if self.fine is None:
            return None
        return WeightForm("fp8" if self.floating else f"int{self.bits}", self.fine, self.zeros)

    @property
    def rounded_inputs(self) -> str | None:
        """How inputs are rounded, in the form in which it is kept."""
        return self.inputs if self.form in (WeightForm("w8a8"), WeightForm("fp8")) else None


@dataclass(frozen=True)
class Matrix:
    """weight[r, c] = (codes[r, c] - zeros[r, g]) * scale[r, g], where g = group_of[c], or c // kind.group."""

    kind: MatrixFormat
    codes: torch.Tensor  # [rows, columns] int8 or float8
    scale: torch.Tensor  # [rows, groups]
    zeros: torch.Tensor | None = None  # [rows, groups] int8
    group_of: torch.Tensor | None = None  # [columns] int64
    input_scale: torch.Tensor | None = None  # [] float32

    def groups(self) -> Groups | None:
        """In the kind's form; coarser groups are repeated."""
        kind, form = self.kind, self.kind.form
        if form is None:
            return None
        scale, zeros = self.scale, self.zeros
        if form.group is not None and form.group != kind.group:
            where = torch.arange(0, kind.shape[1], form.group) // kind.group  # [finer groups]
            scale, zeros = scale[:, where], None if zeros is None else zeros[:, where]
        inputs = kind.rounded_inputs
        return Groups(self.codes, scale, kind.bits, zeros, inputs, self.input_scale if inputs else None)

    def widen(self) -> torch.Tensor:  # [rows, columns] float32
        wide, scale, zeros, where = self.codes.float(), self.scale.float(), self.zeros, self.group_of
        if where is None and self.kind.shape[1] % self.kind.group == 0:
            parts = wide.view(*scale.shape, -1)  # [rows, groups, group]: scales need not be repeated
            scale, zeros = scale[..., None], None if zeros is None else zeros[..., None]
        else:
            where = torch.arange(self.kind.shape[1]) // self.kind.group if where is None else where
            parts, scale, zeros = wide, scale[:, where], None if zeros is None else zeros[:, where]
        if zeros is not None:
            parts -= zeros
        parts *= scale
        return wide


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:  # [..., n] int32 -> [..., n, 32 / bits] uint8
    """The 4- or 8-bit numbers in 32-bit words, the lowest bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def centred(numbers: torch.Tensor, bits: int) -> torch.Tensor:  # uint8 -> int8
    """0 .. 2**bits - 1 as numbers around zero, which is how codes and zeros are kept."""
    if bits == 4:
        return numbers.view(torch.int8) - 8
    return (numbers ^ 128).view(torch.int8)
