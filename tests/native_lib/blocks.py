"""Random blocks of GGUF formats with sensible scales, and what they mean according to the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from tokenmill.ops.native.matrix import OF_GGUF, PackedMatrix

QUANTIZED = {gguf.GGMLQuantizationType(id).name: id for id, form in OF_GGUF.items() if form.values > 1}
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HALVES = {2: (0,), 6: (0,), 8: (0,), 3: (0, 2), 7: (0, 2), 12: (0, 2), 13: (0, 2), 14: (208,)}  # where f16 scales lie


def random_blocks(type_id: int, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """[rows, bytes]: every code and small scale is possible; f16 scales are small and positive or negative."""
    form = OF_GGUF[type_id]
    count = rows * columns // form.values
    raw = random.integers(0, 256, (count, form.size), dtype=np.uint8)
    for at in _HALVES[type_id]:
        halves = random.normal(0, 0.01, count).astype(np.float16)
        raw[:, at : at + 2] = halves[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def meaning(raw: np.ndarray, type_id: int) -> torch.Tensor:  # [rows, columns] float32
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_id)).astype(np.float32))


def packed(raw: np.ndarray, type_id: int, order: np.ndarray | None = None) -> PackedMatrix:
    form = OF_GGUF[type_id]
    matrix = PackedMatrix(raw.shape[0], raw.shape[1] // form.size * form.values)
    matrix.append_blocks(raw.reshape(-1), form, raw.shape[0], order)
    return matrix


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Inputs as the kernels see them: 8 bits in groups of 32, without up to two that are large in their row."""
    groups = x.view(x.shape[0], -1, 32).clone()
    top = groups.abs().amax(-1, keepdim=True)
    limit = 1.25 * top.square().mean(1, keepdim=True)
    outliers = torch.zeros_like(groups)
    for _ in range(2):
        taken = (groups.abs() == top) & (top.square() > limit)
        taken &= taken.cumsum(-1) == 1  # the first of equals
        outliers[taken] = groups[taken]
        groups[taken] = 0
        top = groups.abs().amax(-1, keepdim=True)
    codes = torch.where(top > 0, groups * (127 / top), 0.0).round()
    return (codes.double() * (top.double() / 127) + outliers).view(x.shape)
