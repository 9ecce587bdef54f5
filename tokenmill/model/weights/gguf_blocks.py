"""Turns the block formats of GGUF into floats: with the native library, or in numpy where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.errors import ModelError
from tokenmill.ops.native.blocks import STORAGE, unpack
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.ops.native.library import Library
from tokenmill.ops.native.library import load as load_native

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Order = npt.NDArray[np.int32]  # row r is row order[r] of the file

_CHUNK = 8192  # blocks at a time: the chunk and its float32 form stay in the L2 cache
_SMALL = 1 << 16  # bytes that are decoded in numpy at once, and for which nobody should wait for a compiler


def block_layout(type_id: int) -> tuple[int, int] | None:
    """(values, bytes) of one block of a format, or None if the format is not known."""
    if type_id in OF_GGUF:
        return OF_GGUF[type_id].values, OF_GGUF[type_id].size
    package = _gguf_package()
    try:
        values, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):
        return None
    return int(values), int(size)


def format_name(type_id: int) -> str:
    return OF_GGUF[type_id].name if type_id in OF_GGUF else str(_gguf_package().GGMLQuantizationType(type_id).name)


def unpacked(
    raw: Bytes,  # a tensor in row-major blocks
    type_id: int,
    shape: tuple[int, ...],
    order: Order | None = None,  # of the rows of a matrix
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The floats of a tensor, in memory of their own."""
    native = load_native() if raw.size > _SMALL and type_id in OF_GGUF else None
    if isinstance(native, Library):
        rows, format = math.prod(shape[:-1]), OF_GGUF[type_id]
        written = dtype if dtype in STORAGE else torch.float32
        return unpack(native, raw, format, rows, shape[-1], order, written).view(shape).to(dtype)
    values = dequantize(raw, type_id, shape)
    return torch.from_numpy(values if order is None else values[order]).to(dtype)


def dequantize(raw: Bytes, type_id: int, shape: tuple[int, ...]) -> Floats:
    """The same in numpy: the common formats here, every other one through `gguf`."""
    if type_id not in _OWN:
        return _dequantize_with_package(raw, type_id, shape)
    values, size, decode = _OWN[type_id]
    blocks = raw.reshape(-1, size)
    out = np.empty((blocks.shape[0], values), dtype=np.float32)
    step = _CHUNK * 32 // values
    with np.errstate(all="ignore"):  # infinities in damaged scales are the model's problem, not a warning
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    scale = _half(blocks[:, :2])
    codes = blocks[:, 2:]  # [blocks, 16]: low nibbles are the first 16 values, high nibbles the last 16
    np.multiply((codes & 15).view(np.int8) - np.int8(8), scale, out=out[:, :16])
    np.multiply((codes >> 4).view(np.int8) - np.int8(8), scale, out=out[:, 16:])


def _q4_1(blocks: Bytes, out: Floats) -> None:
    scale_and_min = _half(blocks[:, :4])
    codes = blocks[:, 4:]  # [blocks, 16], as in Q4_0
    np.multiply(codes & 15, scale_and_min[:, :1], out=out[:, :16])
    np.multiply(codes >> 4, scale_and_min[:, :1], out=out[:, 16:])
    out += scale_and_min[:, 1:]


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), out=out)


def _half(columns: Bytes) -> Floats:
    return columns.copy().view("<f2").astype(np.float32)


# type id -> (values per block, bytes per block, decoder)
_OWN: dict[int, tuple[int, int, Callable[[Bytes, Floats], None]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
    30: (1, 2, _bf16),
}


def _dequantize_with_package(raw: Bytes, type_id: int, shape: tuple[int, ...]) -> Floats:
    package = _gguf_package()
    kind = package.GGMLQuantizationType(type_id)
    values, size = package.GGML_QUANT_SIZES[kind]
    rows = raw.reshape(-1, shape[-1] // values * size)
    try:
        with np.errstate(all="ignore"):
            decoded = package.quants.dequantize(rows, kind)
    except NotImplementedError:
        raise ModelError(
            f"GGUF format {kind.name} cannot be decoded by the installed gguf package; "
            "use a file in another format such as Q8_0"
        ) from None
    return np.ascontiguousarray(decoded, dtype=np.float32).reshape(shape)


def _gguf_package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise ModelError("this GGUF file uses a format that needs the gguf package; run `pip install gguf`") from None
    return gguf
