"""Reads the scales of a matrix, however many there are of them, as one per row and group of columns."""

from __future__ import annotations

import math

import torch

from tokenmill.errors import ModelError
from tokenmill.model.weights.quantized.parts import FLOATS, Parts

_POWERS = torch.float8_e8m0fnu  # powers of two


def scale_of_rows(parts: Parts, part: str, rows: int) -> torch.Tensor:  # [rows, 1]
    """One scale per row, or one for the whole matrix."""
    scale = parts.take(part, FLOATS, (rows, 1), (rows,), (1,), (1, 1), ())
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


def scale_of_blocks(
    parts: Parts, part: str, shape: tuple[int, int], block: tuple[int, int]
) -> torch.Tensor:  # [rows, columns / block columns]
    """One scale per block of rows and columns; the last blocks may be smaller."""
    counts = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    scale = parts.take(part, (*FLOATS, _POWERS), counts)
    if scale.dtype == _POWERS:
        scale = scale.float()
    return scale.repeat_interleave(min(block[0], shape[0]), dim=0)[: shape[0]].contiguous()


def input_scale(parts: Parts, part: str | None) -> torch.Tensor | None:  # [] float32
    """The scale of every input; None: each token has its own."""
    if part is None:
        return None
    scale = parts.take(part, FLOATS, (), (1,), (1, 1)).float().reshape(())
    if not bool(scale > 0) or not bool(scale.isfinite()):
        raise ModelError(
            f"tensor {parts.names[part]!r} is {float(scale)}; a scale must be a positive number: download it again"
        )
    return scale
