"""SharedMemoryCommunicator: ranks that are processes of one machine exchange tensors through memory they share."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch

from tokenmill.ops.native import library
from tokenmill.ops.native.collectives import NativeEnd
from tokenmill.parallel.polling import PollingEnd
from tokenmill.parallel.segment import Segment
from tokenmill.parallel.sums import sum_by_pairs


class SharedMemoryCommunicator:
    """A rank's end of one of the segment's groups, with that group's numbering of ranks.

    With the native library its calls can be recorded (but send and receive) and take microseconds; without, they do
    the same in plain torch. A communicator belongs to one thread; `abort` does not, and any process that has the
    segment may end it.
    """

    def __init__(self, segment: Segment, rank: int, group: int = 0, native: bool | None = None) -> None:
        """rank: among all ranks; native: None for where there is the library."""
        self._segment = segment
        members = segment.groups[group]
        self.rank, self.size = members.index(rank), len(members)
        if native is None:
            native = not isinstance(library.load(), str)
        area = segment.area(group)
        self.recordable = native
        self._end: _End = NativeEnd(area, self.rank) if native else PollingEnd(area, self.rank)

    @property
    def counts(self) -> Counter[str]:
        return self._end.counts

    @property
    def bytes(self) -> Counter[str]:
        return self._end.bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.dtype == torch.float32:
            self._end.sum(x)
            return x
        parts = self._end.gather("all_reduce", x)
        return sum_by_pairs(list(parts))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._end.gather("all_gather", x.contiguous())

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != self.size:
            raise ValueError(f"all_to_all got {x.shape[0]} parts for {self.size} ranks")
        return self._end.turn(x.contiguous())

    def barrier(self) -> None:
        self._end.barrier()

    def send(self, x: torch.Tensor, to: int) -> None:
        self._end.send(x.contiguous(), to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        out = torch.empty(like.shape, dtype=like.dtype)
        self._end.receive(out, source)
        return out

    def abort(self) -> None:
        self._segment.abort()

    def close(self) -> None:
        self._segment.forget()


class _End(Protocol):
    """What moves the bytes. Tensors are dense."""

    @property
    def counts(self) -> Counter[str]: ...

    @property
    def bytes(self) -> Counter[str]: ...

    def sum(self, x: torch.Tensor) -> None: ...

    def gather(self, verb: str, x: torch.Tensor) -> torch.Tensor: ...

    def turn(self, x: torch.Tensor) -> torch.Tensor: ...

    def barrier(self) -> None: ...

    def send(self, x: torch.Tensor, to: int) -> None: ...

    def receive(self, out: torch.Tensor, source: int) -> None: ...
