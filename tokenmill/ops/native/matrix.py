"""Packed matrices: weights in the form the native kernels read, filled from GGUF blocks or from floats."""

from __future__ import annotations

import torch

from tokenmill.ops.native import recording
from tokenmill.ops.native.arena import Arena
from tokenmill.ops.native.blocks import Bytes, Order, book_of, check_blocks
from tokenmill.ops.native.formats import FORMS, OF_GGUF, GGUFFormat, PanelForm
from tokenmill.ops.native.library import library
from tokenmill.ops.native.structs import MAX_SEGMENTS, MatmulArgs, RepackArgs, Segment, TakeRowsArgs, check_structs

OF_DTYPE = {torch.float32: OF_GGUF[0], torch.float16: OF_GGUF[1], torch.bfloat16: OF_GGUF[30]}


class PackedMatrix:
    """A [rows, columns] matrix made of segments of rows, each in its own form. Segments are added from row 0 on."""

    def __init__(self, rows: int, columns: int, arena: Arena | None = None) -> None:
        self.rows, self.columns = rows, columns
        self.segments: list[tuple[PanelForm, int, torch.Tensor]] = []  # form, rows, panels
        self._native = library()
        self._arena = arena or Arena(self._native)
        self._matmul = MatmulArgs(k=columns)
        self._take = TakeRowsArgs(k=columns)
        check_structs(self._native)

    @property
    def filled(self) -> int:
        return sum(rows for _, rows, _ in self.segments)

    @property
    def nbytes(self) -> int:
        return sum(len(panels) for _, _, panels in self.segments)

    def append_blocks(self, raw: Bytes, format: GGUFFormat, rows: int, order: Order | None = None) -> None:
        """The next rows, from the blocks of a file; row r of them is row order[r] of the file."""
        check_blocks(raw, format, rows, self.columns, order)
        self._check_room(rows)
        form = format.form
        panels = self._arena.take(form.nbytes(rows, self.columns))
        place = {"source": raw, "order": order, "book": book_of(format), "panels": panels}
        args = RepackArgs(**place, rows=rows, columns=self.columns, format=format.number)
        self._native.run(args.KIND, args)
        self._add(form, rows, panels)

    def adopt(self, form: int, rows: int, panels: torch.Tensor) -> None:  # [bytes] uint8, packed already
        """The next rows, which lie in somebody else's memory, or will when they are multiplied with."""
        known = FORMS[form] if 0 <= form < len(FORMS) else None
        fits = known is not None and panels.dtype == torch.uint8 and len(panels) == known.nbytes(rows, self.columns)
        if not fits or not panels.is_contiguous() or panels.data_ptr() % 64:
            raise ValueError(f"{list(panels.shape)} of {panels.dtype} are no {rows} rows in form {form}")
        self._check_room(rows)
        self._add(FORMS[form], rows, panels)

    def _check_room(self, rows: int) -> None:
        if self.filled + rows > self.rows or len(self.segments) == MAX_SEGMENTS:
            raise ValueError(f"{rows} rows more do not fit in a matrix of {self.rows}")

    def _add(self, form: PanelForm, rows: int, panels: torch.Tensor) -> None:
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
        self._native.run(args.KIND, args)
        return out

    def take_rows(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:  # [n] int64 -> [n, columns]
        """Row `id - first` for every id; zeros where there is none."""
        ids = ids if ids.dtype == torch.int64 and ids.is_contiguous() else ids.to(torch.int64).contiguous()
        n = ids.shape[0]
        out = recording.new((n, self.columns), torch.float32)
        if n == 0:
            return out
        args = self._take
        args.ids, args.out, args.out_stride = ids.data_ptr(), out.data_ptr(), self.columns
        args.m, args.first = recording.row_count(n), first
        self._native.run(args.KIND, args)
        return out
