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
    """Of one machine. Whoever launches writes steps for the ranks that read them there, and reads the statuses of all
    that follow: rank 0 also has those of other machines, which somebody sets for them."""

    def __init__(self, memory: SharedMemory, followers: range, readers: range | None = None) -> None:
        """readers: those of the followers that read the ring; None: all."""
        self.memory, self.followers = memory, followers
        self.readers = followers if readers is None else readers
        self._ended = memory.word(0)
        self._done = {rank: memory.word(self._status(rank)) for rank in followers}
        self._failed = {rank: memory.word(self._status(rank) + _FAILED) for rank in followers}

    @classmethod
    def of_ranks(cls, followers: range, readers: range | None = None) -> Board:
        count = len(followers if readers is None else readers)
        return cls(SharedMemory.of_size(_ring_at(len(followers)) + ring_bytes(count)), followers, readers)

    def writer(self) -> RingWriter:
        return RingWriter(self.memory, _ring_at(len(self.followers)), len(self.readers))

    def reader(self, rank: int) -> RingReader:
        at = _ring_at(len(self.followers))
        return RingReader(self.memory, at, len(self.readers), rank - self.readers.start)

    @property
    def ended(self) -> bool:
        return self._ended.value != 0

    def end(self) -> None:
        """Nobody waits on it any more. Any thread of any rank may say so."""
        self._ended.set(1)
        for word in self._done.values():
            word.wake()

    def done(self, rank: int) -> int:
        """The newest step that a rank is done with."""
        return self._done[rank].value

    def set_done(self, rank: int, step: int) -> None:
        self._done[rank].set(step)

    def wait_changed(self, rank: int, seen: int) -> int:
        """The newest step of a rank, once it is another than `seen`, or after a moment."""
        if (now := self.done(rank)) == seen and not self.ended:
            self._done[rank].wait_while(seen, LOOK)
            now = self.done(rank)
        return now

    def wait_done(self, step: int, check: Callable[[], None]) -> None:
        """Until every rank is done with a step; `check` may raise."""
        for word in self._done.values():
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
        self._failed[rank].set(step)

    @property
    def failure(self) -> tuple[int, str] | None:
        """The first rank that could not do a step, and why."""
        for rank, word in self._failed.items():
            if word.value:
                at = self._status(rank) + _TEXT
                (length,) = struct.unpack_from("<I", self.memory.bytes, at)
                text = self.memory.bytes[at + 4 : at + 4 + min(length, _LONGEST)]
                return rank, text.decode("utf-8", "replace")
        return None

    def failed_step(self, rank: int) -> int:
        return self._failed[rank].value

    def _status(self, rank: int) -> int:
        return _HEAD + _STATUS * (rank - self.followers.start)


def _ring_at(followers: int) -> int:
    return _HEAD + _STATUS * followers
