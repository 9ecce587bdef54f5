"""Weights of four or eight bits as 16-bit words: how codes are packed, in which order words lie, and what they mean.

Where rows and columns fill whole tiles, words are [bands, tiles, 256], scales and zeros [bands, groups, 16], in the
order that ops/triton/gemm/weight_codes.py explains. Other matrices, which are rare, lie in plain order: words
[rows, words], scales and zeros [rows, groups].
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
PARTS = {"int4": 4, "int8": 2, "fp8": 2}  # codes in a word
TILE = 16  # rows, and words of each of them, that lie together
_BITS = 16
_OFFSET = 8  # what is added to a code of four bits, so that it is not negative


def is_tiled(rows: int, columns: int, kind: str) -> bool:
    return rows % TILE == 0 and _run(columns, PARTS[kind]) == TILE


def pack(codes: torch.Tensor, kind: str) -> torch.Tensor:  # [n, columns] -> [n, columns / parts] int16
    parts = PARTS[kind]
    bits = _BITS // parts
    # Wrapped into whole numbers that are not negative; 8-bit codes keep their bytes.
    small = (codes + _OFFSET) if bits == 4 else codes
    small = small.view(torch.uint8).view(codes.shape[0], -1, parts, _run(codes.shape[1], parts))
    words = torch.zeros(small.shape[0], small.shape[1], small.shape[3], dtype=torch.int32, device=codes.device)
    for part in range(parts):
        words |= small[:, :, part].int() << (bits * part)
    return words.flatten(1).to(torch.int16)


def unpack(words: torch.Tensor, kind: str) -> torch.Tensor:  # [n, columns / parts] int16 -> [n, columns]
    parts = PARTS[kind]
    bits = _BITS // parts
    columns = words.shape[1] * parts
    wide = words.view(words.shape[0], -1, 1, _run(columns, parts)).int()
    shifts = torch.arange(0, _BITS, bits, dtype=torch.int32, device=words.device)
    small = ((wide >> shifts[:, None]) & ((1 << bits) - 1)).flatten(1)  # [n, blocks, parts, run] -> [n, columns]
    if bits == 4:
        return (small - _OFFSET).to(torch.int8)
    return small.to(torch.uint8).view(FLOAT8 if kind == "fp8" else torch.int8)


def rows_of(stored: torch.Tensor) -> torch.Tensor:  # [rows, words or groups]
    return stored if stored.dim() == 2 else _by_rows(stored).flatten(0, 2).flatten(1)


def write_rows(stored: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:  # [n], [n, words or groups]
    """Put words, scales or zeros where those of these rows lie."""
    by_rows = _by_rows(stored)
    if by_rows.dim() == 2:
        by_rows[rows] = values.to(by_rows)
    else:
        by_rows[rows // TILE, rows % TILE // 8, rows % 8] = values.to(by_rows).view(-1, *by_rows.shape[3:])


def dequantize(
    codes: torch.Tensor,  # [rows, columns]
    scale: torch.Tensor,  # [rows, groups]
    zeros: torch.Tensor | None,  # [rows, groups]
    dtype: torch.dtype,
) -> torch.Tensor:  # [rows, columns]
    """(codes - zeros) * scale, computed in float32, or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grouped = codes.to(wide).view(*scale.shape, -1)  # [rows, groups, group]
    if zeros is not None:
        grouped = grouped - zeros.to(wide)[..., None]
    return (grouped * scale.to(wide)[..., None]).flatten(1).to(dtype)


def _run(columns: int, parts: int) -> int:
    """How far apart the columns of a word lie."""
    return TILE if columns % (TILE * parts) == 0 else 1


def _by_rows(stored: torch.Tensor) -> torch.Tensor:
    """A view of words, scales or zeros that begins with the dimensions of a row: [rows] or [bands, 2, 8]."""
    if stored.dim() == 2:
        return stored
    if stored.shape[2] == TILE:  # [bands, groups, (g, high)]
        return stored.view(*stored.shape[:2], 8, 2).permute(0, 3, 2, 1)
    lanes = stored.view(*stored.shape[:2], 8, 4, 2, 2, 2)  # bands, tiles, g, t, k_high, high, k_low
    return lanes.permute(0, 5, 2, 1, 4, 3, 6)
