"""The memory that the ranks of one generation share: whether it has ended, how far each rank is, and the ring of steps.

A group that is formed again gets another board. Whoever still writes on the old one is read by nobody.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from tokenmill.engine.ranks.shared_words import SharedMemory
from tokenmill.engine.ranks.step_ring import LOOK, SPINS, RingReader, RingWriter, ring_bytes

_HEAD = 64  # bytes: the word that says that it has ended
_STATUS = 1024  # bytes of each rank: its done step, its failed step, and why that failed
_FAILED, _TEXT = 8, 16
_LONGEST = _STATUS - _TEXT - 4


class Board:
    """Rank 0 writes steps and reads statuses; every other rank has a status of its own."""

    def __init__(self, memory: SharedMemory, ranks: int) -> None:
        self.memory, self.ranks = memory, ranks
        self._ended = memory.word(0)
        self._done = [memory.word(self._status(rank)) for rank in range(1, ranks)]
        self._failed = [memory.word(self._status(rank) + _FAILED) for rank in range(1, ranks)]

    @classmethod
    def of_ranks(cls, ranks: int) -> Board:
        return cls(SharedMemory.of_size(_ring_at(ranks) + ring_bytes(ranks - 1)), ranks)

    def writer(self) -> RingWriter:
        return RingWriter(self.memory, _ring_at(self.ranks), self.ranks - 1)

    def reader(self, rank: int) -> RingReader:
        return RingReader(self.memory, _ring_at(self.ranks), self.ranks - 1, rank - 1)

    @property
    def ended(self) -> bool:
        return self._ended.value != 0

    def end(self) -> None:
        """Nobody waits on it any more. Any thread of any rank may say so."""
        self._ended.set(1)
        for word in self._done:
            word.wake()

    def done(self, rank: int) -> int:
        """The newest step that a rank is done with."""
        return self._done[rank - 1].value

    def set_done(self, rank: int, step: int) -> None:
        self._done[rank - 1].set(step)

    def wait_done(self, step: int, check: Callable[[], None]) -> None:
        """Until every rank is done with a step; `check` may raise."""
        for word in self._done:
            looks = 0
            while (seen := word.value) < step:
                looks += 1
                if looks > SPINS or self.ended:
                    check()
                    word.wait_while(seen, LOOK)

    def fail(self, rank: int, step: int, why: str) -> None:
        """A rank could not do a step, and does no other one."""
        at = self._status(rank) + _TEXT
        text = why.encode("utf-8", "replace")[:_LONGEST]
        struct.pack_into(f"<I{len(text)}s", self.memory.bytes, at, len(text), text)
        self._failed[rank - 1].set(step)

    @property
    def failure(self) -> tuple[int, str] | None:
        """The first rank that could not do a step, and why."""
        for rank, word in enumerate(self._failed, 1):
            if word.value:
                at = self._status(rank) + _TEXT
                (length,) = struct.unpack_from("<I", self.memory.bytes, at)
                text = self.memory.bytes[at + 4 : at + 4 + min(length, _LONGEST)]
                return rank, text.decode("utf-8", "replace")
        return None

    def _status(self, rank: int) -> int:
        return _HEAD + _STATUS * (rank - 1)


def _ring_at(ranks: int) -> int:
    return _HEAD + _STATUS * (ranks - 1)
