"""Native sums and exchanges of tensors between processes: computed at once, or put into the graph being recorded."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.ops.native.call import check_float32, run
from tokenmill.ops.native.library import library
from tokenmill.ops.native.recording import new, row_count
from tokenmill.ops.native.structs import VERBS, ExchangeArgs, Group, SumArgs, check_structs


class Memory(Protocol):
    """What the ranks of a group have in common: tokenmill/parallel/segment.py."""

    @property
    def ended(self) -> npt.NDArray[np.uint32]: ...
    @property
    def filled(self) -> npt.NDArray[np.uint32]: ...
    @property
    def slots(self) -> npt.NDArray[np.uint8]: ...
    @property
    def rings(self) -> npt.NDArray[np.uint32]: ...
    @property
    def bytes_of_rings(self) -> npt.NDArray[np.uint8]: ...


class NativeEnd:
    """One rank's end of a group."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._library = library()
        check_structs(self._library)
        self._group = Group()
        self._address = ctypes.addressof(self._group)
        group = self._group
        for name in ("ended", "filled", "slots", "rings", "bytes_of_rings"):
            setattr(group, name, getattr(memory, name).ctypes.data)
        group.rank, group.size, group.round = rank, len(memory.filled), int(memory.filled[rank, 0])
        group.slot_bytes, group.ring_bytes = memory.slots.shape[2], memory.bytes_of_rings.shape[2]
        self._memory = memory  # lives as long as this

    @property
    def counts(self) -> Counter[str]:
        return Counter({verb: n for verb, n in zip(VERBS, self._group.counts, strict=True) if n})

    @property
    def bytes(self) -> Counter[str]:
        return Counter({verb: n for verb, n in zip(VERBS, self._group.bytes, strict=True) if self.counts[verb]})

    def sum(self, x: torch.Tensor) -> None:  # [rows, ...] float32, dense; becomes the sum
        check_float32(x)
        rows = x.shape[0] if x.dim() else 1
        run(SumArgs(group=self._address, x=x, rows=row_count(rows), dim=x.numel() // rows if rows else 0))

    def gather(self, verb: str, x: torch.Tensor) -> torch.Tensor:  # [rows, ...] dense -> [size, rows, ...]
        out = new((self._group.size, *x.shape), x.dtype)
        self._exchange(verb, x, out, 0)
        return out

    def turn(self, x: torch.Tensor) -> torch.Tensor:  # [size, rows, ...] dense -> the same
        out = new(tuple(x.shape), x.dtype)
        self._exchange("all_to_all", x[0], out, out[0].nbytes, x)
        return out

    def barrier(self) -> None:
        run(ExchangeArgs(group=self._address, rows=1, verb=VERBS.index("barrier")))

    def send(self, x: torch.Tensor, to: int) -> None:
        self._library.check_peers(self._library.c.tm_send(self._address, to, x.data_ptr(), x.nbytes))

    def receive(self, out: torch.Tensor, source: int) -> None:
        self._library.check_peers(self._library.c.tm_receive(self._address, source, out.data_ptr(), out.nbytes))

    def _exchange(
        self, verb: str, part: torch.Tensor, out: torch.Tensor, x_part: int, x: torch.Tensor | None = None
    ) -> None:
        rows = part.shape[0] if part.dim() else 1
        run(ExchangeArgs(
            group=self._address, x=part if x is None else x, out=out, rows=row_count(rows),
            row_bytes=part.nbytes // rows if rows else 0, x_part=x_part, out_part=part.nbytes, verb=VERBS.index(verb),
        ))  # fmt: skip
