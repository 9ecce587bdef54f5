"""Journal: an append-only file of records that survives a crash at any byte, a full disk, and a restart.

A record is its length, a checksum and its bytes. Opening a journal reads what is whole and cuts off what is not: only
the last record can be torn, because appends go to the end, and one that failed is cut off before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tokenmill.errors import ConfigError, TokenmillError

MAGIC = b"tokenmill journal 1\n"
FSYNC = ("always", "interval", "never")
_HEAD = struct.Struct("<II")  # length, checksum
MOST = 256 * 1024 * 1024  # bytes of a record; a longer length is damage


class JournalFull(TokenmillError):
    """A record could not be written; nothing of it is in the journal. Mostly the disk is full."""


class Journal:
    """One writer at a time, held by a lock on the file. `append` returns when the record is as safe as `fsync` asks:

    always    on the disk
    interval  with the kernel, and on the disk soon after `interval` seconds if appends go on, or when `flushed` returns
    never     with the kernel: survives the death of this process, not of the machine

    Disks may take seconds. Whoever serves others meanwhile takes `interval` and awaits `flushed`: a thread waits then,
    once for all who do.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fsync: str = "interval",
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if fsync not in FSYNC:
            raise ConfigError(f"the journal's fsync is {fsync!r}; it must be one of {', '.join(FSYNC)}")
        self.path = Path(path)
        self.healthy = True  # the last write went through
        self.cut = 0  # bytes at the end that were no whole record when it was opened
        self._fsync = fsync
        self._interval = interval
        self._clock = clock
        self._synced = clock()
        self._appended = self._on_disk = 0  # records of this process
        self._thread = ThreadPoolExecutor(1, "journal")  # started when it is needed
        self._running: Future[None] | None = None  # what the thread does
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigError(f"the journal {self.path} cannot be opened: {error.strerror}") from None
        self._end = 0
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):  # a device or a pipe might never end
                raise ConfigError(f"the journal {self.path} is no ordinary file; give another path")
            self._lock()
            self.recovered: list[bytes] = self._recover()  # what earlier runs wrote; the owner may clear it
        except BaseException:
            os.close(self._file)
            raise

    @property
    def size(self) -> int:
        """Bytes."""
        return self._end

    def append(self, record: bytes) -> None:
        """Add a record. Raises JournalFull, and then the journal is as it was."""
        data = _framed(record)
        try:
            self._write(data, self._end)
            if self._fsync == "always":
                os.fsync(self._file)
        except OSError as error:
            self._cut_to(self._end)
            self.healthy = False
            hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "check the disk"
            raise JournalFull(f"the journal {self.path} cannot be written ({error.strerror}); {hint}") from None
        self._end += len(data)
        self._appended += 1
        self.healthy = True
        if self._fsync == "always":
            self._on_disk = self._appended
        elif self._fsync == "interval" and self._clock() - self._synced >= self._interval:
            self._sync_later()

    def flush(self) -> None:
        """Everything appended is on the disk when this returns. Raises JournalFull."""
        if self._on_disk < self._appended:
            try:
                os.fsync(self._file)
            except OSError as error:
                self.healthy = False
                raise self._not_on_disk(error) from None
            self._on_disk = self._appended

    async def flushed(self) -> None:
        """Like `flush`, while others go on. All who wait for the same are served by one fsync."""
        wanted = self._appended
        while self._on_disk < wanted:
            try:
                await asyncio.shield(asyncio.wrap_future(self._sync_later()))
            except OSError as error:
                raise self._not_on_disk(error) from None

    def _sync_later(self) -> Future[None]:
        """What the thread does already, which may not know of the last records, or from now on."""
        if self._running is None or self._running.done():
            self._synced = self._clock()
            # A descriptor of its own: a rewrite closes the journal's.
            self._running = self._thread.submit(self._sync, os.dup(self._file), self._appended)
        return self._running

    def _sync(self, file: int, appended: int) -> None:
        """In the thread."""
        try:
            os.fsync(file)
            self._on_disk = max(self._on_disk, appended)
        except OSError:
            self.healthy = False
            raise
        finally:
            os.close(file)

    def _not_on_disk(self, error: OSError) -> JournalFull:
        return JournalFull(f"the journal {self.path} cannot be written ({error.strerror}); check the disk")

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace everything by these records, all or nothing, even if the machine dies meanwhile."""
        fresh = self.path.with_name(self.path.name + ".new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = _write_all(file, MAGIC, 0)
            for record in records:
                end += _write_all(file, _framed(record), end)
            os.fsync(file)
            os.replace(fresh, self.path)
        except OSError as error:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise JournalFull(f"the journal {self.path} cannot be rewritten ({error.strerror})") from None
        os.close(self._file)
        self._file, self._end, self._on_disk = file, end, self._appended
        _sync_folder(self.path.parent)

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(JournalFull):
                self.flush()
            self._thread.shutdown()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"the journal {self.path} is in use by another server; give each its own") from None

    def _recover(self) -> list[bytes]:
        data = _read_all(self._file)
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise ConfigError(f"{self.path} is no journal of tokenmill; give another path, or move it away")
        if len(data) < len(MAGIC):  # new, or torn at its very beginning
            self._end = len(MAGIC)
            try:
                self._write(MAGIC, 0)
            except OSError as error:
                raise ConfigError(f"the journal {self.path} cannot be begun: {error.strerror}") from None
            return []
        records, at = [], len(MAGIC)
        while (record := _record_at(data, at)) is not None:
            records.append(record)
            at += _HEAD.size + len(record)
        self._end, self.cut = at, len(data) - at
        if self.cut:
            self._cut_to(at)
        return records

    def _write(self, data: bytes, at: int) -> None:
        _write_all(self._file, data, at)

    def _cut_to(self, end: int) -> None:
        """Best effort: what cannot be cut off now is overwritten by the next append, and cut when it is opened."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, end)


def _framed(record: bytes) -> bytes:
    if len(record) > MOST:
        raise JournalFull(f"a record of {len(record)} bytes is too long for the journal; the limit is {MOST}")
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def _record_at(data: bytes, at: int) -> bytes | None:
    """The record that begins there, or None where none is whole."""
    if at + _HEAD.size > len(data):
        return None
    length, checksum = _HEAD.unpack_from(data, at)
    record = data[at + _HEAD.size : at + _HEAD.size + length]
    return record if len(record) == length and zlib.crc32(record) == checksum else None


def _write_all(file: int, data: bytes, at: int) -> int:
    """Writes may be partial when space runs out."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], at + written)
    return len(data)


def _read_all(file: int) -> bytes:
    parts, at = [], 0
    while part := os.pread(file, 1 << 20, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
