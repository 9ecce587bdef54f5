"""Blocks of GGUF formats through the native library: to floats, and from floats."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.errors import ModelError
from tokenmill.ops.native.arena import Arena
from tokenmill.ops.native.formats import GGUFFormat
from tokenmill.ops.native.library import Library
from tokenmill.ops.native.structs import RoundArgs, UnpackArgs, check_structs

MOST_GROUP = 128  # src/matrix.h
STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int32]  # row r is row order[r] of the source


def unpack(
    native: Library,
    raw: Bytes,  # rows one after the other
    format: GGUFFormat,
    rows: int,
    columns: int,
    order: Order | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [rows, columns]
    check_structs(native)
    check_blocks(raw, format, rows, columns, order)
    # In large pages: of small ones, taking them from the system would cost more than filling them.
    out = Arena(native, chunk=0).take(rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
    place = {"source": raw, "order": order, "book": book_of(format), "out": out}
    args = UnpackArgs(**place, rows=rows, columns=columns, format=format.number, storage=STORAGE[dtype])
    native.run(args.KIND, args)
    return out


def rounded(native: Library, weight: torch.Tensor, format: GGUFFormat, group: int) -> Bytes:  # [rows, columns]
    """The nearest numbers in blocks of Q4_0, Q4_1 or Q8_0; `group` columns share a scale."""
    check_structs(native)
    if weight.dtype not in STORAGE:
        weight = weight.float()
    weight = weight.contiguous()
    rows, columns = weight.shape
    if format.name not in ("Q4_0", "Q4_1", "Q8_0") or columns % group or group % 32 or group > MOST_GROUP:
        raise ValueError(f"{columns} columns cannot be rounded to {format.name} in groups of {group}")
    size = rows * columns // format.values * format.size
    blocks = Arena(native, chunk=0).take(size)
    kinds = {"format": format.number, "storage": STORAGE[weight.dtype]}
    args = RoundArgs(source=weight, blocks=blocks, rows=rows, columns=columns, group=group, **kinds)
    native.run(args.KIND, args)
    return blocks.numpy()


def check_blocks(raw: Bytes, format: GGUFFormat, rows: int, columns: int, order: Order | None) -> None:
    """The library reads what its arguments say, wherever that is."""
    if columns % format.values or raw.dtype != np.uint8 or not raw.flags.c_contiguous:
        raise ValueError(f"{columns} columns of {raw.dtype} cannot be read as {format.name}")
    if raw.size != rows * (columns // format.values) * format.size:
        raise ValueError(f"{rows} x {columns} in {format.name} do not take {raw.size} bytes")
    if order is None:
        return
    if order.dtype != np.int32 or not order.flags.c_contiguous:
        raise ValueError(f"the order of rows is {order.dtype}, not int32")
    if len(order) != rows or order.min() < 0 or order.max() >= rows:
        raise ValueError("the order of rows names rows that are not there")


@lru_cache
def book_of(format: GGUFFormat) -> npt.NDArray[np.int8] | None:
    """The values that indices of a format stand for; the gguf package has them."""
    if format.book is None:
        return None
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import _type_traits
    except ImportError:
        raise ModelError(f"GGUF format {format.name} needs the gguf package; run `pip install gguf`") from None
    traits: Any = _type_traits[GGMLQuantizationType[format.name]]
    traits.init_grid()
    values = np.asarray(traits.grid).reshape(format.book)
    if format.name.startswith("IQ1"):
        values = 8 * values  # an eighth is added to each, or taken away
    return np.ascontiguousarray(values, dtype=np.int8)
