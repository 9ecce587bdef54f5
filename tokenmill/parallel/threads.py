"""Ranks as threads of one process: the communicator in its plainest form, for tests and to compare others with."""

from __future__ import annotations

from collections import Counter, deque
from threading import Condition

import torch

from tokenmill.parallel.communicator import PeerLostError
from tokenmill.parallel.sums import sum_by_pairs


class ThreadCommunicator:
    """One thread's end of a group that lives in this process; `thread_communicators` makes all ends at once.

    Stricter than the others: ranks whose calls differ in verb, shape or type are told so, and the group ends.
    """

    recordable = False

    def __init__(self, table: _Table, rank: int) -> None:
        self.rank, self.size = rank, table.size
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._table = table
        self._calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange("all_reduce", x)
        return sum_by_pairs(parts) if self.size > 1 else x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("all_gather", x))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[self.rank] for part in self._exchange("all_to_all", x)])

    def barrier(self) -> None:
        self._exchange("barrier", torch.empty(0))

    def send(self, x: torch.Tensor, to: int) -> None:
        self._count("send", x)
        self._table.send(self.rank, to, x.clone())

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        self._count("receive", like)
        x = self._table.receive(source, self.rank)
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            self._table.abort()
            raise ValueError(
                f"rank {source} sent {list(x.shape)} of {x.dtype} where rank {self.rank} receives "
                f"{list(like.shape)} of {like.dtype}"
            )
        return x

    def abort(self) -> None:
        """Ends the group, for whoever waits and for every later call; any thread may."""
        self._table.abort()

    def close(self) -> None:
        pass

    def _count(self, verb: str, x: torch.Tensor) -> None:
        self.counts[verb] += 1
        self.bytes[verb] += x.nbytes

    def _exchange(self, verb: str, x: torch.Tensor) -> list[torch.Tensor]:
        self._count(verb, x)
        call = self._calls
        self._calls += 1
        return self._table.exchange(self.rank, call, verb, x)


def thread_communicators(size: int) -> list[ThreadCommunicator]:
    table = _Table(size)
    return [ThreadCommunicator(table, rank) for rank in range(size)]


class _Table:
    """Where the threads of a group lay down tensors for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = Condition()
        self._aborted = False
        self._rounds: dict[int, list[tuple[str, torch.Tensor] | None]] = {}  # by number of the call
        self._readers: Counter[int] = Counter()
        self._sent: dict[tuple[int, int], deque[torch.Tensor]] = {}  # by (from, to)

    def exchange(self, rank: int, call: int, verb: str, x: torch.Tensor) -> list[torch.Tensor]:
        with self._changed:
            self._check()
            laid = self._rounds.setdefault(call, [None] * self.size)
            laid[rank] = (verb, x.clone())  # what a rank does with its tensor afterwards is its own affair
            self._changed.notify_all()
            while any(part is None for part in laid):
                self._check()
                self._changed.wait()
            parts = [part for part in laid if part is not None]
            self._readers[call] += 1
            if self._readers[call] == self.size:
                del self._rounds[call], self._readers[call]
        asked = [f"{name} {list(part.shape)} of {part.dtype}" for name, part in parts]
        if len(set(asked)) > 1:
            self.abort()
            raise ValueError("ranks disagree about what comes next: " + ", ".join(asked))
        return [part for _, part in parts]

    def send(self, source: int, to: int, x: torch.Tensor) -> None:
        with self._changed:
            self._check()
            self._sent.setdefault((source, to), deque()).append(x)
            self._changed.notify_all()

    def receive(self, source: int, to: int) -> torch.Tensor:
        with self._changed:
            self._check()
            queue = self._sent.setdefault((source, to), deque())
            while not queue:
                self._check()
                self._changed.wait()
            return queue.popleft()

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._aborted:
            raise PeerLostError("a rank of the group is gone")
