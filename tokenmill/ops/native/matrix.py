"""Packed matrices: weights in the form the native kernels read, filled from GGUF blocks or from floats."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.ops.native import recording
from tokenmill.ops.native.library import Library, library

MATMUL, REPACK, TAKE_ROWS = 1, 2, 3  # src/matrix.h
PANEL, GROUP, SUPER, MAX_SEGMENTS = 16, 32, 256, 4  # src/formats.h
_CHUNK = 32 << 20  # bytes that an arena asks for at once

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """One way in which rows are stored. `values` and `size` describe the blocks of the file it is made from."""

    number: int
    name: str
    values: int  # per source block
    size: int  # bytes of a source block
    codes: int  # bytes of codes per panel and group of 32 columns, or per column where dense
    chunk: int = 1  # groups that have their scales in one place
    scales: int = 0  # bytes of these

    def panel_bytes(self, columns: int) -> int:
        if self.values == 1:
            return -(-self.codes * columns // 64) * 64
        groups = columns // GROUP
        return -(-groups // self.chunk) * self.scales + groups * self.codes

    def nbytes(self, rows: int, columns: int) -> int:
        return -(-rows // PANEL) * self.panel_bytes(columns)


F32 = Form(0, "f32", 1, 4, 64)
F16 = Form(1, "f16", 1, 2, 32)
BF16 = Form(2, "bf16", 1, 2, 32)
INT4 = Form(3, "int4", 32, 18, 256, 2, 64)  # scale per 32 columns
INT4_MIN = Form(4, "int4+min", 32, 20, 256, 1, 64)  # scale and minimum per 32 columns
INT4_K = Form(5, "int4k", 256, 144, 256, 8, 320)
INT5 = Form(6, "int5", 32, 22, 320, 2, 64)
INT5_MIN = Form(7, "int5+min", 32, 24, 320, 1, 64)
INT5_K = Form(8, "int5k", 256, 176, 320, 8, 320)
INT6_K = Form(9, "int6k", 256, 210, 384, 8, 320)
INT8 = Form(10, "int8", 32, 34, 512, 2, 64)  # scale per 32 columns

FORMS = (F32, F16, BF16, INT4, INT4_MIN, INT4_K, INT5, INT5_MIN, INT5_K, INT6_K, INT8)
OF_GGUF = {
    **{0: F32, 1: F16, 30: BF16, 2: INT4, 3: INT4_MIN, 6: INT5, 7: INT5_MIN, 8: INT8},
    **{12: INT4_K, 13: INT5_K, 14: INT6_K},
}
OF_DTYPE = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}


class Segment(ctypes.Structure):
    _fields_ = [("panels", ctypes.c_void_p), ("rows", ctypes.c_int64), ("form", ctypes.c_int64)]


class MatmulArgs(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("segments", Segment * MAX_SEGMENTS),
    ]


class RepackArgs(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("form", ctypes.c_int64),
    ]


class TakeRowsArgs(ctypes.Structure):
    _fields_ = [
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("segments", Segment * MAX_SEGMENTS),
    ]


class Arena:
    """Memory in large pages, handed out in order: weights that are read one after the other lie so."""

    def __init__(self, native: Library) -> None:
        self._native = native
        self._chunk: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:  # [size] uint8, aligned to a cache line; freed with its last view
        if self._used + size > len(self._chunk):
            whole = max(size, _CHUNK)
            address = self._native.c.tm_alloc(whole)
            if not address:
                raise MemoryError(f"no memory for {whole:,} bytes of weights or KV cache")
            buffer = (ctypes.c_uint8 * whole).from_address(address)
            weakref.finalize(buffer, self._native.c.tm_free, address, whole).atexit = False
            self._chunk, self._used = torch.frombuffer(buffer, dtype=torch.uint8), 0
        part = self._chunk[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return part


class PackedMatrix:
    """A [rows, columns] matrix made of segments of rows, each in its own form. Segments are added from row 0 on."""

    def __init__(self, rows: int, columns: int, arena: Arena | None = None) -> None:
        self.rows, self.columns = rows, columns
        self.segments: list[tuple[Form, int, torch.Tensor]] = []  # form, rows, panels
        self._native = library()
        self._arena = arena or Arena(self._native)
        self._matmul = MatmulArgs(k=columns)
        self._take = TakeRowsArgs(k=columns)
        _check(self._native)

    @property
    def filled(self) -> int:
        return sum(rows for _, rows, _ in self.segments)

    @property
    def nbytes(self) -> int:
        return sum(len(panels) for _, _, panels in self.segments)

    def append_blocks(self, raw: Bytes, form: Form, rows: int, order: npt.NDArray[np.int32] | None = None) -> None:
        """The next rows, from the blocks of a file; row r of them is row order[r] of the file."""
        if self.columns % form.values or raw.dtype != np.uint8 or not raw.flags.c_contiguous:
            raise ValueError(f"{self.columns} columns of {raw.dtype} cannot be read as {form.name}")
        if raw.size != rows * (self.columns // form.values) * form.size:
            raise ValueError(f"{rows} x {self.columns} in {form.name} do not take {raw.size} bytes")
        if self.filled + rows > self.rows or len(self.segments) == MAX_SEGMENTS:
            raise ValueError(f"{rows} rows more do not fit in a matrix of {self.rows}")
        if order is not None and (len(order) != rows or order.min() < 0 or order.max() >= rows):
            raise ValueError("the order of rows names rows that are not there")
        panels = self._arena.take(form.nbytes(rows, self.columns))
        order = None if order is None else np.ascontiguousarray(order, dtype=np.int32)
        args = RepackArgs(
            source=raw.ctypes.data,
            order=None if order is None else order.ctypes.data,
            panels=panels.data_ptr(),
            rows=rows,
            columns=self.columns,
            form=form.number,
        )
        self._native.run(REPACK, args)
        number = len(self.segments)
        self.segments.append((form, rows, panels))
        for known in (self._matmul, self._take):
            known.segments[number] = Segment(panels.data_ptr(), rows, form.number)
            known.num_segments = number + 1

    def append_floats(self, weight: torch.Tensor) -> None:  # [n, columns]
        """The next rows, kept in the 16- or 32-bit type they come in."""
        if weight.dtype not in OF_DTYPE:
            weight = weight.float()
        raw = weight.contiguous().view(torch.uint8).numpy().reshape(-1)
        self.append_blocks(raw, OF_DTYPE[weight.dtype], weight.shape[0])

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # [m, columns] -> [m, rows]
        """x must be float32 with dense rows; row strides are free."""
        if x.dtype != torch.float32 or x.shape[1] != self.columns or (x.shape[1] > 1 and x.stride(1) != 1):
            raise ValueError(f"inputs are {list(x.shape)} of {x.dtype}; {self.columns} float32 columns are needed")
        m = x.shape[0]
        out = recording.new((m, self.rows), torch.float32)
        if m == 0:
            return out
        args = self._matmul
        args.x, args.x_stride, args.out, args.out_stride = x.data_ptr(), x.stride(0), out.data_ptr(), self.rows
        args.bias = None if bias is None else bias.data_ptr()
        args.m = recording.row_count(m)
        self._native.run(MATMUL, args)
        return out

    def take_rows(self, ids: torch.Tensor) -> torch.Tensor:  # [n] int64 -> [n, columns]
        ids = ids if ids.dtype == torch.int64 and ids.is_contiguous() else ids.to(torch.int64).contiguous()
        n = ids.shape[0]
        out = recording.new((n, self.columns), torch.float32)
        if n == 0:
            return out
        args = self._take
        args.ids, args.out, args.out_stride = ids.data_ptr(), out.data_ptr(), self.columns
        args.m = recording.row_count(n)
        self._native.run(TAKE_ROWS, args)
        return out


def _check(native: Library) -> None:
    for kind, struct in ((MATMUL, MatmulArgs), (REPACK, RepackArgs), (TAKE_ROWS, TakeRowsArgs)):
        native.check(kind, struct)
