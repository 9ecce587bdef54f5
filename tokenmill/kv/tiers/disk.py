"""DiskTier: blocks in preallocated files that outlive the engine; what is torn, flipped or another's is not found."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from functools import partial
from pathlib import Path

from tokenmill.errors import ConfigError
from tokenmill.kv.tiers.files import PAGE, Files
from tokenmill.kv.tiers.queued import QueuedTier, ThreadBell, TransferFailed
from tokenmill.kv.tiers.records import Header, read_header
from tokenmill.kv.tiers.slots import Slots
from tokenmill.kv.transport import BlockMemory, Checksum, Namespace

log = logging.getLogger("tokenmill.kv")

SEGMENT = 256 << 20  # bytes of a file, about
THREADS = 4
MOST_OWNERS = 64  # engines that share a folder, each with a part of its own
MOST_SOLVED, SOLVED_SHARE = 64 << 30, 10  # bytes, and the part of what is free, that are used where nobody says
MOST_BAD_WRITES = 8  # in a row, after which nothing is written any more


class DiskTier(QueuedTier):
    """Records of a header's page and a block, each in a slot of a segment.

    Nothing is ever synced: a record that was cut short by the end of the process or the machine has a wrong checksum,
    and is not there. The index is rebuilt from the headers when the engine starts, while it already serves.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        namespace: Namespace,
        memory: BlockMemory,
        checksum: Checksum,
        bell: ThreadBell,
        *,
        key: bytes,
        lock: int = -1,  # a descriptor that is held as long as the folder is ours
        files: Files | None = None,
        name: str = "disk",
    ) -> None:
        self.folder, self.namespace, self._key, self._lock_file = folder, namespace, key, lock
        self.files = files or Files()
        self._record = PAGE + -(-memory.block_bytes // PAGE) * PAGE
        self._per_segment = max(1, min(SEGMENT, size) // self._record)
        self._most_segments = size // (self._per_segment * self._record)
        self._segments: list[int] = []  # descriptors
        self._sequence = 0
        self._bad_writes = 0
        self._full = False  # there is no room for another segment
        self._growing = threading.Lock()
        self._buffers = threading.local()
        self._scanned = threading.Event()
        self._stop = threading.Event()
        self._forgotten: list[str | None] = []  # before it was known what there is
        super().__init__(name, memory, Slots(), checksum, bell, THREADS)
        self._scanner = threading.Thread(target=self._scan, name=f"kv-{name}-index", daemon=True)
        self._scanner.start()

    def describe(self, block_size: int) -> str:
        blocks = self._most_segments * self._per_segment
        size = blocks * self._record
        return f"{size / (1 << 30):.2f} GiB in {self.folder}, {blocks * block_size:,} tokens"

    def wait_until_scanned(self, seconds: float) -> bool:
        """Whether all that was there before is known."""
        return self._scanned.wait(seconds)

    def close(self) -> None:
        self._stop.set()
        self._scanner.join()
        super().close()
        for file in self._segments:
            self.files.close(file)
        self._segments.clear()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def forget(self, salt: str | None) -> None:
        super().forget(salt)
        with self.lock:
            if not self._scanned.is_set():
                self._forgotten.append(salt)

    # In threads

    def _hashed(self, salt: str) -> bytes:
        return hashlib.blake2b(salt.encode(), key=self._key, digest_size=16).digest() if salt else bytes(16)

    def _salt_name(self, salt: str) -> str:
        return self._hashed(salt).hex() if salt else ""

    def _dropped(self, slots: list[int]) -> None:
        if slots and self._bad_writes < MOST_BAD_WRITES:
            self._queue.put(partial(self._erase, slots))

    def _erase(self, slots: list[int]) -> None:
        """The next engine must not find them either. Whoever has taken a slot meanwhile loses a block: a miss."""
        nothing = self.memory.allocate(PAGE)
        nothing[:] = bytes(PAGE)
        for slot in slots:
            with contextlib.suppress(OSError):
                file, at = self._place(slot)
                self.files.write(file, nothing, at)

    def _write_one(self, identity: bytes, salt: str, block: int, slot: int) -> None:
        if self._bad_writes >= MOST_BAD_WRITES:
            raise TransferFailed(f"{self.folder} failed {MOST_BAD_WRITES} times in a row; nothing is written any more")
        buffer = self._buffer()
        payload = buffer[PAGE : PAGE + self.memory.block_bytes]
        self.memory.gather([block], [payload])
        with self.lock:
            self._sequence += 1
            sequence = self._sequence
        header = Header(
            self.namespace.digest, identity, self._hashed(salt), sequence, len(payload), self.checksum(payload)
        )
        header.pack_into(buffer)
        file, at = self._place(slot)
        try:
            self.files.write(file, buffer, at)
        except OSError as error:
            self._bad_writes += 1
            raise TransferFailed(f"writing to {self.folder}: {error.strerror or error}") from None
        self._bad_writes = 0

    def _read_some(self, identities: list[bytes], slots: list[int], blocks: list[int]) -> int:
        buffer = self._buffer()
        payload = buffer[PAGE : PAGE + self.memory.block_bytes]
        for number, (identity, slot, block) in enumerate(zip(identities, slots, blocks, strict=True)):
            file, at = self._place(slot)
            try:
                count = self.files.read(file, buffer, at)
            except OSError as error:
                with self.lock:
                    self.slots.drop(identity)
                log.debug("reading from %s: %s", self.folder, error)
                return number
            header = read_header(buffer)
            whole = (
                count == len(buffer)
                and header is not None
                and header.namespace == self.namespace.digest
                and header.identity == identity
                and header.length == len(payload)
                and header.checksum == self.checksum(payload)
            )
            if not whole:
                return number
            self.memory.scatter([block], [payload])
        return len(blocks)

    def _make_room(self, count: int) -> None:
        """Another segment, as long as there may be one."""
        if not self._scanned.is_set():
            raise TransferFailed(f"{self.folder} is still being read")
        with self._growing:
            while not self._full and len(self._segments) < self._most_segments:
                with self.lock:
                    if self.slots.num_free >= count:
                        return
                self._add_segment(len(self._segments))
        if not self.slots.count:
            raise TransferFailed(f"there is no room in {self.folder} for a single segment")

    def _add_segment(self, number: int) -> None:
        size = self._per_segment * self._record
        file = self.files.open(self._path(number))
        try:
            self.files.reserve(file, size)
        except OSError as error:
            self.files.close(file)
            self._path(number).unlink(missing_ok=True)
            self._full = True
            what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"gives no room ({error})"
            log.warning("kv disk: %s %s; it holds %d blocks and takes no more", self.folder, what, self.slots.count)
            return
        self._segments.append(file)
        with self.lock:
            self.slots.add(range(number * self._per_segment, (number + 1) * self._per_segment))

    def _scan(self) -> None:
        """What was written before: the headers say what lies where."""
        found: list[tuple[int, bytes, bytes, int]] = []
        free: list[int] = []
        view = self.memory.allocate(PAGE)
        try:
            for number in range(self._most_segments):
                if not self._path(number).exists() or self._stop.is_set():
                    break
                file = self.files.open(self._path(number))
                self._segments.append(file)
                size = self._per_segment * self._record
                if self.files.size(file) < size:  # it was cut: what is left is still there
                    self.files.reserve(file, size)
                for place in range(self._per_segment):
                    slot = number * self._per_segment + place
                    try:
                        count = self.files.read(file, view, place * self._record)
                    except OSError:
                        count = 0
                    header = read_header(view) if count == PAGE else None
                    if header is not None and header.namespace == self.namespace.digest:
                        found.append((header.sequence, header.identity, header.salt, slot))
                    else:
                        free.append(slot)
                    if self._stop.is_set():
                        return
            for path in self.folder.glob("segment-*"):  # of a larger size than is wanted now
                if int(path.name.partition("-")[2]) >= self._most_segments:
                    path.unlink()
        except OSError as error:
            log.warning("kv disk: %s can only be read in part: %s", self.folder, error)
        found.sort()
        with self.lock:
            for sequence, identity, salt, slot in found:
                self._sequence = sequence
                self.slots.restore(identity, salt.hex() if any(salt) else "", slot)
            for slot in free:
                self.slots.add(range(slot, slot + 1))
            for forgotten in self._forgotten:
                self._dropped(self.slots.drop_salt(None if forgotten is None else self._salt_name(forgotten)))
            self._scanned.set()
        if found:
            log.info("kv disk: %d blocks of %s are known again", len(self.slots), self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"segment-{number:05d}"

    def _place(self, slot: int) -> tuple[int, int]:
        number, place = divmod(slot, self._per_segment)
        return self._segments[number], place * self._record

    def _buffer(self) -> memoryview:
        """A record's room of this thread, at a page's address."""
        if not hasattr(self._buffers, "record"):
            self._buffers.record = self.memory.allocate(self._record)
        buffer: memoryview = self._buffers.record
        return buffer


def open_disk(
    path: str,
    size: int | None,
    namespace: Namespace,
    memory: BlockMemory,
    checksum: Checksum,
    bell: ThreadBell,
    files: Files | None = None,
) -> DiskTier:
    """A part of the folder that no other engine uses and that holds blocks of this model, if any."""
    root = Path(path).expanduser()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = _key(root / "key")
        free = shutil.disk_usage(root).free
        for number in range(MOST_OWNERS):
            # Whoever sees the folder learns neither model nor how many engines have the same.
            named = namespace.digest + number.to_bytes(4, "little")
            folder = root / hashlib.blake2b(named, key=key, digest_size=12).hexdigest()
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            there = sum(part.stat().st_size for part in folder.glob("segment-*"))
            room = size if size is not None else min(MOST_SOLVED, (free + there) // SOLVED_SHARE)
            least = PAGE + -(-memory.block_bytes // PAGE) * PAGE
            if room < least:
                os.close(lock)
                raise ConfigError(
                    f"kv_disk_bytes is {room:,}, but a block takes {least:,} bytes on disk; raise it to that or more"
                )
            return DiskTier(folder, room, namespace, memory, checksum, bell, key=key, lock=lock, files=files)
    except OSError as error:
        raise ConfigError(
            f"kv_disk_path is {path!r}, where nothing can be kept: {error.strerror or error}; choose a folder that "
            "can be written to, or leave it out"
        ) from None
    raise ConfigError(
        f"kv_disk_path is {path!r}, which {MOST_OWNERS} engines of this model use already; give this one another"
    )


def _key(path: Path) -> bytes:
    """32 bytes that only whoever may read the folder knows; made once."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        found = path.read_bytes()
        if len(found) == 32:
            return found
        path.unlink(missing_ok=True)  # cut short: nothing named with it can be of use
        return _key(path)
    with os.fdopen(file, "wb") as opened:
        made = os.urandom(32)
        opened.write(made)
    return made
