"""Random blocks of GGUF formats with sensible scales, and what they mean according to the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.matrix import PackedMatrix

BLOCKS = {format.name: id for id, format in OF_GGUF.items() if format.values > 1}
QUANTIZED = {name: id for name, id in BLOCKS.items() if not OF_GGUF[id].form.is_dense}  # packed in small numbers
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Where f16 scales lie.
_HALVES = {
    **dict.fromkeys((2, 6, 8, 16, 17, 18, 19, 20, 21, 22, 23), (0,)),
    **dict.fromkeys((3, 7, 12, 13), (0, 2)),
    **{10: (80, 82), 11: (108,), 14: (208,), 29: (), 34: (52,), 35: (64,), 39: (), 40: ()},
}
_IQ1_M, _MXFP4 = 29, 39


def random_blocks(type_id: int, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """[rows, bytes]: every code and small scale is possible; f16 scales are small and positive or negative."""
    format = OF_GGUF[type_id]
    count = rows * columns // format.values
    raw = random.integers(0, 256, (count, format.size), dtype=np.uint8)
    for at in _HALVES[type_id]:
        halves = random.normal(0, 0.01, count).astype(np.float16)
        raw[:, at : at + 2] = halves[:, None].view(np.uint8)
    if type_id == _IQ1_M:  # four bits of its f16 are the upper ones of each 16-bit number from byte 48 on
        halves = random.normal(0, 0.01, count).astype(np.float16).view(np.uint16)
        for part in range(4):
            raw[:, 49 + 2 * part] = raw[:, 49 + 2 * part] & 15 | (halves >> 4 * part & 15) << 4
    if type_id == _MXFP4:
        raw[:, 0] = random.integers(115, 125, count)  # of a power of two
    return raw.reshape(rows, -1)


def meaning(raw: np.ndarray, type_id: int) -> torch.Tensor:  # [rows, columns] float32
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_id)).astype(np.float32))


def packed(raw: np.ndarray, type_id: int, order: np.ndarray | None = None) -> PackedMatrix:
    format = OF_GGUF[type_id]
    matrix = PackedMatrix(raw.shape[0], raw.shape[1] // format.size * format.values)
    matrix.append_blocks(raw.reshape(-1), format, raw.shape[0], order)
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
