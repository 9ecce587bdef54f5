"""Segment: the piece of memory that ranks on one machine have in common, from its creation until nobody has it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.errors import ConfigError, PeerLostError
from tokenmill.parallel.layout import MAX_RANKS

SHARED_MEMORY = Path("/dev/shm")
SLOT_BYTES = 512 << 10  # longer tensors go in pieces of this size
RING_BYTES = 256 << 10  # what one rank may have sent to another that has not received it yet

_PREFIX = "tokenmill-ranks-"
_PAGE, _LINE = 4096, 64
_MAGIC = 0x746D2D72616E6B31  # changes with what is where
_OPENED, _NUMBERS = 64, 128  # where these begin
_FIRST = 2**32 - 256  # words begin shortly before they begin again, so that every use passes that point

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Area:
    """What one group of ranks has of the segment. Words lie in cache lines of their own: the first of 16 counts."""

    ended: Words  # [1]: 0, or the generation that has ended; of the whole segment
    filled: Words  # [size, 16]: handshakes for which each rank has filled its slot
    slots: Bytes  # [size, 2, slot_bytes]
    rings: Words  # [size, size, 2, 16]: lines that the first has written for the second, and that this one has read
    bytes_of_rings: Bytes  # [size, size, ring_bytes]

    @property
    def size(self) -> int:
        return len(self.filled)


class Segment:
    """Ranks have it from an open file (`unname`), or find it by its name, a path that nobody else can open and that
    goes as soon as all have it.

    It serves one generation of ranks. Whoever has it may end that, from any thread: every wait on it ends within
    milliseconds, and every later call at once.
    """

    def __init__(self, path: str, memory: Bytes, keep: int | None) -> None:
        self.name = path  # empty where it was opened without one
        self._file = keep
        self._memory = memory
        numbers = memory[_NUMBERS:_PAGE].view(np.int64)
        magic, generation, self.slot_bytes, self.ring_bytes, count = (int(one) for one in numbers[:5])
        if magic != _MAGIC:
            raise ConfigError(f"{path} is not a segment of this version of tokenmill: use one version for all ranks")
        self.generation = generation
        self.groups: list[tuple[int, ...]] = []  # the first one has all ranks
        at = 5
        for _ in range(count):
            size = int(numbers[at])
            self.groups.append(tuple(int(rank) for rank in numbers[at + 1 : at + 1 + size]))
            at += 1 + size
        self._ended = memory[:4].view(np.uint32)
        self._opened = memory[_OPENED : _OPENED + len(self.groups[0])]
        self._finish = weakref.finalize(self, _forget, path, keep)  # at exit, too
        if keep is None:
            self._finish.detach()  # another process made it

    @classmethod
    def create(
        cls,
        groups: Sequence[Sequence[int]],  # the first one names all ranks, 0 to their count; others are some of these
        *,
        generation: int = 1,
        slot_bytes: int = SLOT_BYTES,
        ring_bytes: int = RING_BYTES,
        folder: Path | None = None,
    ) -> Segment:
        ranks = list(range(len(groups[0])))
        if list(groups[0]) != ranks or not 0 < len(ranks) <= MAX_RANKS or generation < 1:
            raise ValueError(f"the first group of {groups} is not of all of 1 to {MAX_RANKS} ranks")
        if slot_bytes < _PAGE or slot_bytes % _LINE or ring_bytes < _PAGE or ring_bytes & (ring_bytes - 1):
            raise ValueError(f"{slot_bytes} bytes per slot and {ring_bytes} per ring: whole lines, and a power of two")
        if folder is None:
            folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        _forget_orphans(folder)
        length = _PAGE + sum(_area_bytes(len(group), slot_bytes, ring_bytes) for group in groups)
        path, file = _new_file(folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, length)  # memory that is not there would end us with a signal later
            else:
                os.ftruncate(file, length)
            memory = _map(file)
        except OSError as error:
            _forget(path, file)
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(
                f"{folder} has no room for the {length >> 20} MiB through which {len(ranks)} ranks exchange tensors: "
                "make it larger (in a container, --shm-size=1g)"
            ) from error
        numbers = [_MAGIC, generation, slot_bytes, ring_bytes, len(groups)]
        for group in groups:
            numbers += [len(group), *group]
        if len(numbers) * 8 > _PAGE - _NUMBERS:
            _forget(path, file)
            raise ValueError(f"{len(groups)} groups are too many for one segment")
        memory[_NUMBERS : _NUMBERS + len(numbers) * 8].view(np.int64)[:] = numbers
        segment = cls(path, memory, file)
        for index in range(len(groups)):
            area = segment.area(index)
            area.filled[:, 0] = _FIRST
            area.rings[..., 0] = _FIRST
        return segment

    def unname(self) -> int:
        """Remove the name, and have others open this file instead, which is there until `forget`: however its maker
        ends, nothing is left behind.
        """
        assert self._file is not None
        Path(self.name).unlink(missing_ok=True)
        self.name = ""
        return self._file

    @classmethod
    def open(cls, name: str | int, rank: int) -> Segment:
        """By a rank, by its name or an open file, which is taken over. The last one to come removes the name."""
        try:
            file = name if isinstance(name, int) else os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerLostError(f"{name} is gone: the group of rank {rank} has ended before it came") from error
        try:
            found = os.fstat(file)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o600 or found.st_size < _PAGE:
                raise ConfigError(f"{name} is not a segment of this user's ranks")
            memory = _map(file)
        finally:
            os.close(file)
        segment = cls("" if isinstance(name, int) else name, memory, None)
        if segment.ended:
            raise PeerLostError(f"the group of rank {rank} has ended before it came")
        segment.enter(rank)
        return segment

    def enter(self, rank: int) -> None:
        """For the one that made it, if it is a rank itself."""
        self._opened[rank] = 1
        if self._opened.all():
            self.forget()

    def forget(self) -> None:
        """Remove the name: who has the segment keeps it, nobody else will."""
        if not self._finish() and self.name:
            _forget(self.name, None)

    def abort(self) -> None:
        self._ended[0] = self.generation
        if self.name:  # else others may be about to get the file
            self.forget()

    @property
    def ended(self) -> bool:
        return bool(self._ended[0])

    def area(self, group: int) -> Area:
        """Views of the memory, which live as long as anything refers to them."""
        start = _PAGE + sum(_area_bytes(len(one), self.slot_bytes, self.ring_bytes) for one in self.groups[:group])
        size = len(self.groups[group])
        parts = []
        for length in _part_bytes(size, self.slot_bytes, self.ring_bytes):
            parts.append(self._memory[start : start + length])
            start += length
        filled, slots, rings, bytes_of_rings = parts
        return Area(
            ended=self._ended,
            filled=filled.view(np.uint32).reshape(-1, _LINE // 4)[:size],
            slots=slots.reshape(size, 2, self.slot_bytes),
            rings=rings.view(np.uint32).reshape(-1, _LINE // 4)[: size * size * 2].reshape(size, size, 2, _LINE // 4),
            bytes_of_rings=bytes_of_rings.reshape(size, size, self.ring_bytes),
        )


def _part_bytes(size: int, slot_bytes: int, ring_bytes: int) -> list[int]:
    whole = [size * _LINE, size * 2 * slot_bytes, size * size * 2 * _LINE, size * size * ring_bytes]
    return [-(-one // _PAGE) * _PAGE if one % _PAGE else one for one in whole]


def _area_bytes(size: int, slot_bytes: int, ring_bytes: int) -> int:
    return sum(_part_bytes(size, slot_bytes, ring_bytes))


def _map(file: int) -> Bytes:
    return np.frombuffer(mmap.mmap(file, 0), dtype=np.uint8)


def _new_file(folder: Path) -> tuple[str, int]:
    """Locked as long as its maker lives and has not removed it: see _forget_orphans."""
    while True:
        path = str(folder / f"{_PREFIX}{secrets.token_hex(16)}")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(file, 0o600)  # whatever the umask is
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # nobody took it for an orphan before it was locked
            return path, file
        os.close(file)


def _forget_orphans(folder: Path) -> None:
    """Makers that were killed before all ranks had come left these."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # its maker lives
        finally:
            os.close(file)


def _forget(path: str, file: int | None) -> bool:
    Path(path).unlink(missing_ok=True)
    if file is not None:
        os.close(file)
    return True
