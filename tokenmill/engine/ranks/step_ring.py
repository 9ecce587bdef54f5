"""A ring in shared memory through which one process tells all others the same messages, in order.

Messages are bytes, and of any size: what does not fit a slot is cut into several. Whoever carries the same messages
over another way (to other machines: `line.py`) has to keep their order and to say when a reader is behind, no more.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable

from tokenmill.engine.ranks.shared_words import SharedMemory

SLOTS, SLOT_BYTES = 32, 16 << 10
_LINE = 64  # bytes of a cache line: what different processes write lies in different ones
_HEADER = struct.Struct("<III4x")  # length, whether more follows, checksum
SPINS = 40  # looks before sleeping: what follows at once need not wake anybody
NAP = 0.00005  # seconds between looks for room, which is rarely missing
LOOK = 0.05  # seconds between looks whether anybody is left to wait for


class RingBehindError(Exception):
    """A reader has not made room in time."""


class TornMessageError(Exception):
    """What a slot holds is not what was written."""


def ring_bytes(readers: int, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> int:
    return _LINE * (1 + readers) + slots * (_HEADER.size + slot_bytes)


class _Ring:
    """[ head | one tail per reader | slots ]: how many slots were ever written, and how many each reader has read."""

    def __init__(self, memory: SharedMemory, offset: int, readers: int, slots: int, slot_bytes: int) -> None:
        self._head = memory.word(offset)
        self._tails = [memory.word(offset + _LINE * (1 + reader)) for reader in range(readers)]
        self._slots, self._slot_bytes = slots, slot_bytes
        self._first = offset + _LINE * (1 + readers)
        self._bytes = memory.bytes

    def _at(self, number: int) -> int:
        return self._first + number % self._slots * (_HEADER.size + self._slot_bytes)


class RingWriter(_Ring):
    def __init__(
        self, memory: SharedMemory, offset: int, readers: int, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        super().__init__(memory, offset, readers, slots, slot_bytes)

    def send(self, message: bytes, patience: float, check: Callable[[], None]) -> None:
        """`check` is called while there is no room, and may raise."""
        size = self._slot_bytes
        for first in range(0, max(len(message), 1), size):
            self._put(message[first : first + size], first + size < len(message), patience, check)

    def _put(self, part: bytes, more: bool, patience: float, check: Callable[[], None]) -> None:
        number, waited = self._head.value, 0.0
        while number - min((tail.value for tail in self._tails), default=number) >= self._slots:
            check()
            if waited > patience:
                raise RingBehindError(f"a reader has made no room for {patience:g} s")
            time.sleep(NAP)
            waited += NAP
        at = self._at(number)
        _HEADER.pack_into(self._bytes, at, len(part), more, zlib.crc32(part, number & 0xFFFFFFFF))
        self._bytes[at + _HEADER.size : at + _HEADER.size + len(part)] = part
        self._head.set(number + 1)

    def wake(self) -> None:
        """Have readers look whether they are to go on waiting."""
        self._head.wake()


class RingReader(_Ring):
    def __init__(
        self,
        memory: SharedMemory,
        offset: int,
        readers: int,
        reader: int,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        super().__init__(memory, offset, readers, slots, slot_bytes)
        self._tail = self._tails[reader]

    def receive(self, ended: Callable[[], bool]) -> bytes | None:
        """The next message; None when there is none and `ended` says that none will come."""
        parts: list[bytes] = []
        while True:
            number = self._tail.value
            for _ in range(SPINS):
                if self._head.value != number:
                    break
            else:
                if ended():
                    return None
                self._head.wait_while(number, LOOK)
                continue
            part, more = self._take(number)
            parts.append(part)
            self._tail.set(number + 1)
            if not more:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, number: int) -> tuple[bytes, bool]:
        """A processor may show the head before what was written first: the checksum tells."""
        at = self._at(number)
        for _ in range(1000):
            length, more, checksum = _HEADER.unpack_from(self._bytes, at)
            if length <= self._slot_bytes:
                part = self._bytes[at + _HEADER.size : at + _HEADER.size + length]
                if zlib.crc32(part, number & 0xFFFFFFFF) == checksum:
                    return part, bool(more)
            time.sleep(NAP)
        raise TornMessageError(f"slot {number} holds {length} bytes that are not what was written")
