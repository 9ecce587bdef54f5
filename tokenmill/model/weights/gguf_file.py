"""Reads the GGUF container: metadata and the tensor table, bounds-checked over a memory map."""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import ModelError
from tokenmill.model.weights.gguf_blocks import block_layout, format_name

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file and how its blocks are encoded."""

    name: str
    shape: tuple[int, ...]  # row-major, as torch orders it
    type_id: int
    offset: int  # from the start of the file
    num_bytes: int

    def place(self, part: int | None = None) -> tuple[int, int]:
        """Offset and bytes of the tensor, or of one part along its first dimension."""
        if part is None:
            return self.offset, self.num_bytes
        size = self.num_bytes // self.shape[0]
        return self.offset + part * size, size


class GGUFFile:
    """One .gguf file: `metadata`, `tensors` and the raw bytes of a tensor. Nothing is copied until asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._buffer = _map(self.path)
        reader = _Reader(self._buffer, self.path)
        num_tensors = reader.header()
        self.metadata: dict[str, Any] = reader.metadata()
        self.tensors: dict[str, TensorInfo] = reader.tensor_table(num_tensors, self.metadata)

    def raw(self, info: TensorInfo, part: int | None = None) -> npt.NDArray[np.uint8]:
        """The encoded bytes of a tensor, or of a part along its first dimension, as a read-only view of the map."""
        offset, size = info.place(part)
        return np.frombuffer(self._buffer, dtype=np.uint8, count=size, offset=offset)

    def prefetch(self, info: TensorInfo, part: int | None = None) -> None:
        """Have the system read it in one go: the threads that unpack it touch it at several places at once."""
        self._advise("MADV_WILLNEED", info, part)

    def release(self, info: TensorInfo, part: int | None = None) -> None:
        """Let go of the pages that hold a tensor; they are read from the file again if somebody asks."""
        self._advise("MADV_DONTNEED", info, part)

    def _advise(self, what: str, info: TensorInfo, part: int | None) -> None:
        if hasattr(mmap, what):
            offset, size = info.place(part)
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._buffer.madvise(getattr(mmap, what), start, offset + size - start)


def weights_form(path: Path) -> str:
    """The format that most of a file's bytes are in, such as Q4_1."""
    sizes: Counter[int] = Counter()
    for info in GGUFFile(path).tensors.values():
        sizes[info.type_id] += info.num_bytes
    return format_name(sizes.most_common(1)[0][0]) if sizes else ""


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty; download the GGUF file again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the path") from None


class _Reader:
    """A cursor over the head of the file; every read is checked against the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._size = len(buffer)
        self._path = path
        self._at = 0
        self._num_entries = 0

    def header(self) -> int:
        """Checks magic and version and returns the number of tensors."""
        magic = self._buffer[:4]
        if magic != _MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file (it begins with {magic!r}); give a .gguf file")
        self._at = 4
        version = self._u32()
        if version not in (2, 3):
            raise ModelError(
                f"{self._path} has GGUF version {version}; only little-endian versions 2 and 3 are supported, "
                "so convert the model again with a current converter"
            )
        num_tensors, self._num_entries = self._u64(), self._u64()
        # An entry takes at least 13 bytes and a tensor 32: larger counts cannot be true, and are never looped over.
        if num_tensors * 32 + self._num_entries * 13 > self._size:
            raise self._corrupt(f"it declares {num_tensors} tensors and {self._num_entries} metadata entries")
        return num_tensors

    def metadata(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(self._num_entries):
            key = self._string()
            if key in entries:
                raise self._corrupt(f"metadata key {key!r} appears twice")
            entries[key] = self._value(self._u32(), depth=0)
        return entries

    def tensor_table(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        heads = [self._tensor_head() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r} instead of a power of two")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in heads:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} appears twice")
            tensors[name] = self._place(name, shape, type_id, data_start + offset)
        return tensors

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions")
        dims = [self._u64() for _ in range(num_dims)]
        if min(dims) < 1:
            raise self._corrupt(f"tensor {name!r} has a dimension of 0")
        return name, tuple(reversed(dims)), self._u32(), self._u64()

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        layout = block_layout(type_id)
        if layout is None:
            raise ModelError(
                f"{self._path} holds tensor {name!r} in the unknown format {type_id}; "
                "use a file in a common format such as Q8_0"
            )
        values, size = layout
        if shape[-1] % values:
            raise self._corrupt(f"tensor {name!r} has rows of {shape[-1]} values in blocks of {values}")
        num_bytes = math.prod(shape) // values * size
        if offset + num_bytes > self._size:
            raise self._corrupt(f"tensor {name!r} ends at byte {offset + num_bytes} of a file of {self._size} bytes")
        return TensorInfo(name, shape, type_id, offset, num_bytes)

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise self._corrupt(f"metadata holds a value of the unknown type {kind}")
        value = self._numbers(kind, 1)[0]
        if kind == _FLOAT:
            return float(str(value))  # the number that was meant: 1e-05 instead of 9.999999747378752e-06
        return bool(value) if kind == _BOOL else value.item()

    def _array(self, depth: int) -> Any:
        kind, count = self._u32(), self._u64()
        if kind in _SCALARS:
            values = self._numbers(kind, count)
            return values.astype(bool) if kind == _BOOL else values
        if depth > _MAX_ARRAY_DEPTH:
            raise self._corrupt("metadata arrays are nested too deeply")
        if count * 8 > self._size - self._at:  # a string or an inner array takes at least 8 bytes
            raise self._corrupt(f"a metadata array declares {count} entries")
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, depth) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """The hot loop of opening a file: a vocabulary has up to a few hundred thousand strings."""
        buffer, size, at, read = self._buffer, self._size, self._at, _U64.unpack_from
        result: list[str] = []
        append = result.append
        for _ in range(count):
            begin = at + 8
            if begin > size:
                raise self._truncated()
            at = begin + read(buffer, begin - 8)[0]
            if at > size:
                raise self._truncated()
            append(buffer[begin:at].decode("utf-8", "replace"))
        self._at = at
        return result

    def _string(self) -> str:
        return self._strings(1)[0]

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(_SCALARS[kind])
        start = self._advance(count * dtype.itemsize)
        if count == 0:
            return np.empty(0, dtype=dtype)
        return np.frombuffer(self._buffer, dtype=dtype, count=count, offset=start)

    def _u32(self) -> int:
        return int(_U32.unpack_from(self._buffer, self._advance(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack_from(self._buffer, self._advance(8))[0])

    def _advance(self, num_bytes: int) -> int:
        start = self._at
        if num_bytes > self._size - start:
            raise self._truncated()
        self._at = start + num_bytes
        return start

    def _truncated(self) -> ModelError:
        return self._corrupt(f"the file ends early, at byte {self._size}")

    def _corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged: {what}; download or convert it again")
