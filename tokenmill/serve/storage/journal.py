"""Journal: an append-only file of records that survives a crash at any byte, a full disk, and a restart.

A record is its length, a checksum and its bytes. A crash can only tear the last one, because appends go to the end, and
one that failed is cut off before the next. Opening a journal takes what is whole and sets the rest aside, in a file
beside it, whatever else may have happened: no damage keeps a server from starting.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.serve.storage.journal_recovery import MAGIC, RecoveredJournal, framed, recover_journal

log = logging.getLogger("tokenmill.serve")

FSYNC = ("always", "interval", "never")
MOST = 256 * 1024 * 1024  # bytes of a record
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JournalFull(TokenmillError):
    """A record could not be written; nothing of it is in the journal. Mostly the disk is full."""


class Journal:
    """One writer at a time, held by a lock on the file, and one thread of that. `append` returns when the record is as
    safe as `fsync` asks:

    always    on the disk
    interval  with the kernel, and on the disk soon after `interval` seconds if appends go on, or when `flushed` returns
    never     with the kernel: survives the death of this process, not of the machine; nor does `flushed` do more

    Disks may take seconds. Whoever serves others meanwhile takes `interval` and awaits `flushed`: a thread waits then,
    once for all who do.

    A kernel says only once that it could not bring to the disk what it had taken, and then forgets it. So when an fsync
    fails after its records were appended, the journal takes no more, until a `rewrite` brings everything to the disk.
    The same goes for one that is opened on a full disk, where it cannot be begun or mended: what it has can be read.
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
        self.cut = 0  # bytes that were no whole records when it was opened,
        self.aside: Path | None = None  # and where they are now
        self._fsync = fsync
        self._interval = interval
        self._clock = clock
        self._synced = clock()
        self._lost: OSError | None = None  # why some of what was appended is not on the disk
        self._unsaved = b""  # what must be set aside before the file is changed
        self._appended = self._safe = 0  # records of this process, and how many are as safe as `fsync` asks
        self._thread = ThreadPoolExecutor(1, "journal")  # started when it is needed
        self._running: Future[None] | None = None  # what the thread does
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the journal {self.path} cannot be opened: {error.strerror}; give a path where this user may write"
            ) from None
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
        return self._end

    @property
    def lost(self) -> bool:
        """Records that were appended may not be on the disk, ever; only a `rewrite` helps."""
        return self._lost is not None

    def append(self, record: bytes) -> None:
        """Add a record. Raises JournalFull, and then the journal is as it was."""
        data = _checked(record)
        if self._lost is not None:
            raise self._full(self._lost)
        try:
            _write_all(self._file, data, self._end)
            if self._fsync == "always":
                os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # what cannot be cut off now is overwritten, or cut when it is opened
                os.ftruncate(self._file, self._end)
            raise self._full(error) from None
        self._end += len(data)
        self._appended += 1
        if self._fsync != "interval":
            self._safe = self._appended
        elif self._clock() - self._synced >= self._interval:
            with contextlib.suppress(RuntimeError):  # it is written; the next one tries again
                self._sync_later()

    def flush(self) -> None:
        """Everything appended is on the disk when this returns. Raises JournalFull."""
        self._wait()
        if self._safe < self._appended:
            self._sync()
            if self._lost is not None:
                raise self._full(self._lost)

    async def flushed(self) -> None:
        """Like `flush`, while others go on. All who wait for the same are served by one fsync."""
        wanted = self._appended
        while self._safe < wanted:
            if self._lost is not None:
                raise self._full(self._lost)
            try:
                running = self._sync_later()
            except RuntimeError as error:
                raise JournalFull(f"the journal {self.path} cannot be brought to the disk ({error})") from None
            await asyncio.shield(asyncio.wrap_future(running))

    def _sync_later(self) -> Future[None]:
        """What the thread does already, which may not know of the last records, or from now on. Raises RuntimeError
        where no thread can be started."""
        if self._running is None or self._running.done():
            self._running = self._thread.submit(self._sync)
            self._synced = self._clock()
        return self._running

    def _wait(self) -> None:
        """Of two fsyncs of a file at a time only one would be told of an error; and a rewrite closes the file."""
        if self._running is not None:
            wait([self._running])

    def _sync(self) -> None:
        """Mostly in the thread."""
        appended = self._appended
        if self._lost is None:
            try:
                os.fsync(self._file)
                self._safe = appended
            except OSError as error:
                self._lost = error
                log.error("the journal %s could not be brought to the disk: %s", self.path, error.strerror)

    def _full(self, error: OSError) -> JournalFull:
        hint = "free some space" if error.errno in _NO_ROOM else "check the disk"
        if self._lost is not None:
            hint += " and start again"
        return JournalFull(f"the journal {self.path} cannot be written ({error.strerror}); {hint}")

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace everything by these records, all or nothing, even if the machine dies. Raises JournalFull."""
        self._wait()
        try:
            self._set_aside()
            self._replace(records)
        except OSError as error:
            raise JournalFull(f"the journal {self.path} cannot be rewritten ({error.strerror})") from None
        try:
            _sync_folder(self.path.parent)
        except OSError as error:  # the old file may come back, which knows nothing of what is appended from now on
            self._lost = error
            raise self._full(error) from None
        self._lost, self._safe = None, self._appended

    def _replace(self, records: Iterable[bytes]) -> None:
        fresh, file = self.path.with_name(self.path.name + ".new"), -1
        try:
            file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = _write_all(file, MAGIC, 0)
            for record in records:
                end += _write_all(file, _checked(record), end)
            os.fsync(file)
            os.replace(fresh, self.path)
        except OSError:
            if file >= 0:
                os.close(file)
                with contextlib.suppress(OSError):
                    fresh.unlink()
            raise
        old, self._file, self._end = self._file, file, end
        with contextlib.suppress(OSError):
            os.close(old)

    def set_aside(self, records: list[bytes]) -> None:
        """Keep records that are no use to their owner in a file beside, because a `rewrite` without them follows.
        Raises JournalFull."""
        self._unsaved += b"".join(map(framed, records))
        try:
            self._set_aside()
        except OSError as error:
            raise self._full(error) from None

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(JournalFull):
                self.flush()
            self._thread.shutdown()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"the journal {self.path} is in use by another server{_holder(self._file)}; "
                "stop that one, or give each its own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the journal {self.path} cannot be locked: {error.strerror}; give a path on another disk"
            ) from None

    def _recover(self) -> list[bytes]:
        """What is whole, with the file brought to where appends can go on."""
        try:
            found = recover_journal(data := _read_all(self._file))
        except OSError as error:
            raise ConfigError(
                f"the journal {self.path} cannot be read: {error.strerror}; check the disk, or give another path"
            ) from None
        if found.foreign:
            raise ConfigError(f"{self.path} is no journal of tokenmill; give another path, or move it away")
        self.cut, self._unsaved = len(found.rest), found.rest.rstrip(b"\0")
        try:
            self._mend(found, len(data))
            self._settle()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise ConfigError(
                    f"the journal {self.path} cannot be written: {error.strerror}; check the disk, or give another path"
                ) from None
            self._lost = error
            log.error("the journal %s takes no jobs (%s); free some space and start again", self.path, error.strerror)
        self._tell(found)
        return found.records

    def _mend(self, found: RecoveredJournal, size: int) -> None:
        self._end = found.end or len(MAGIC)
        self._set_aside()
        if found.end is not None:
            if found.end < size:
                os.ftruncate(self._file, found.end)
        elif found.records:
            self._replace(found.records)
        else:
            _write_all(self._file, MAGIC, 0)
            os.ftruncate(self._file, len(MAGIC))

    def _set_aside(self) -> None:
        if not self._unsaved:
            return
        for number in itertools.count(1):
            beside = self.path.with_name(f"{self.path.name}.torn-{number}")
            try:
                file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileExistsError:
                continue
        try:
            _write_all(file, self._unsaved, 0)
            os.fsync(file)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        finally:
            os.close(file)
        self.aside, self._unsaved = beside, b""

    def _tell(self, found: RecoveredJournal) -> None:
        where = f"they are in {self.aside}" if self.aside else "they are in it still" if self._unsaved else "all zeros"
        if found.version is not None:
            log.warning(
                "the journal %s has version %d, which is not read here; a new one is begun, and as to its %d bytes, %s",
                self.path, found.version, self.cut, where,
            )  # fmt: skip
        elif self.cut:
            log.warning(
                "the journal %s was damaged; its %d whole records are kept, and %d bytes are no records: %s",
                self.path, len(found.records), self.cut, where,
            )  # fmt: skip

    def _settle(self) -> None:
        """What is found counts as on the disk, but may be with the kernel only; and a new file is nowhere before its
        folder is there."""
        if self._fsync != "never":
            os.fsync(self._file)
            _sync_folder(self.path.parent)


def _checked(record: bytes) -> bytes:
    if len(record) > MOST:
        raise JournalFull(f"a record of {len(record)} bytes is too long for the journal; the limit is {MOST}")
    return framed(record)


def _holder(file: int) -> str:
    """Who has locked a file, where the system tells."""
    found = os.fstat(file)
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == name and int(fields[4]) > 0:
                return f" (process {fields[4]})"
    return ""


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
    """A new name is on the disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not do this to folders
            raise
    finally:
        os.close(handle)
