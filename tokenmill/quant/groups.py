"""Groups: a matrix as small numbers with a scale per group of columns; what every public format comes down to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.ops.weight_words import dequantize


@dataclass(frozen=True)
class Groups:
    """weight[r, c] = (codes[r, c] - zeros[r, c // group]) * scale[r, c // group]."""

    codes: torch.Tensor  # [rows, columns] int8 (four bits: -8..7), or float8_e4m3fn
    scale: torch.Tensor  # [rows, columns / group], a float dtype
    bits: int  # 4 or 8
    zeros: torch.Tensor | None = None  # [rows, columns / group] int8; None: none, codes are symmetric
    inputs: str | None = None  # how inputs are rounded: "int8" or "fp8"; None: they are multiplied as they are
    input_scale: torch.Tensor | None = None  # [] float32: of every input; None: each token has its own

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return int(self.codes.shape[1] // self.scale.shape[1])

    def widen(self, dtype: torch.dtype) -> torch.Tensor:  # [rows, columns]
        """The matrix that these numbers stand for; computed in float32, or wider."""
        return dequantize(self.codes, self.scale, self.zeros, dtype)
