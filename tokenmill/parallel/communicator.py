"""Communicator: how ranks of a group exchange tensors. What CPUs, GPUs and tests use implements it."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch

from tokenmill.errors import PeerLostError as PeerLostError


class Communicator(Protocol):
    """One rank's end of a group. Every rank makes the same calls in the same order, with tensors of the same shape.

    No call waits for a rank that is gone: it raises PeerLostError, and so does every later call. Sums are in rank
    order by pairs ((0 + 1) + (2 + 3)), so all ranks get the same bits, and groups of 2 and 4 the same as one rank that
    adds the same parts so. `counts` and `bytes` say what was asked for, by name of the verb: bytes of the rank's own
    tensors. A result may lie in memory that the next call of the same verb uses again.
    """

    rank: int
    size: int

    @property
    def recordable(self) -> bool:
        """Whether its calls can be put into a recorded step."""
        ...

    @property
    def counts(self) -> Counter[str]: ...

    @property
    def bytes(self) -> Counter[str]: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, for all; `x` itself may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:  # [...] -> [size, ...]
        """All ranks' tensors, for all."""
        ...

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:  # [size, ...] -> [size, ...]
        """What every rank has for this one: x[i] goes to rank i."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """To one rank, which receives in the same order. May return before it does, and takes a copy then."""
        ...

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """From one rank, a tensor of this shape and type."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def abort(self) -> None:
        """Ends the group for all ranks, whoever waits included; any thread of any rank may call it."""
        ...

    def close(self) -> None: ...
