"""QueuedTier: a place whose copies are made by threads of its own, in the order asked for, with a bounded queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from tokenmill.kv.tiers.slots import Slots
from tokenmill.kv.transport import BlockMemory, Checksum, Done

MOST_WAITING = 64  # tickets
CLOSING = 30.0  # seconds that a copy under way is given at the end


class ThreadBell:
    """Rung by threads, waited for by one."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
        self._event.clear()


class TransferFailed(Exception):
    """Why a copy was not made; the message is what is told."""


@dataclass(slots=True)
class Job:
    """A ticket on its way through the threads."""

    ticket: int
    identities: list[bytes]
    blocks: list[int]
    salt: str | None  # None: a read
    slots: list[int] = field(default_factory=list)  # of leading identities, of a read
    dropped: set[bytes] = field(default_factory=set)  # not to be found once they are written
    arrived: int = 0  # so far, where somebody else has to say so


class QueuedTier:
    """What host memory and disk have in common: everything of `Transport` but the copying itself.

    Subclasses copy in `_write_one` and `_read_some`, called by threads without the lock.
    """

    finishes = False  # at the end, what was asked for is still done

    def __init__(
        self, name: str, memory: BlockMemory, slots: Slots, checksum: Checksum, bell: ThreadBell, threads: int = 1
    ) -> None:
        self.name, self.memory, self.slots, self.checksum, self.bell = name, memory, slots, checksum, bell
        self.lock = threading.Lock()
        self.most_waiting = MOST_WAITING
        self._queue: SimpleQueue[Job | Callable[[], None] | None] = SimpleQueue()
        self._open: dict[int, Job] = {}
        self._done: deque[Done] = deque()
        self._number = 0
        self._closing = False
        self._threads = [threading.Thread(target=self._work, name=f"kv-{name}", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    # Of Transport

    def lookup(self, identities: Sequence[bytes]) -> int:
        with self.lock:
            return self.slots.leading(list(identities))

    def read(self, identities: Sequence[bytes], blocks: Sequence[int]) -> int | None:
        return self._ask(list(identities), list(blocks), None)

    def write(self, identities: Sequence[bytes], blocks: Sequence[int], salt: str) -> int | None:
        return self._ask(list(identities), list(blocks), salt)

    def lease(self, identities: Sequence[bytes], seconds: float) -> int:
        until = time.monotonic() + seconds
        with self.lock:
            count = self.slots.leading(list(identities))
            for identity in identities[:count]:
                self.slots.lease(identity, until)
            return count

    def discard(self, identities: Sequence[bytes]) -> None:
        with self.lock:
            self._dropped([slot for identity in identities if (slot := self.slots.drop(identity)) is not None])
            for job in self._open.values():
                job.dropped.update(identities)

    def forget(self, salt: str | None) -> None:
        with self.lock:
            self._dropped(self.slots.drop_salt(None if salt is None else self._salt_name(salt)))
            for job in self._open.values():
                if salt is None or job.salt == salt:
                    job.dropped.update(job.identities)

    def usage(self) -> tuple[int, int]:
        return len(self.slots), self.slots.count

    def poll(self) -> list[Done]:
        ended: list[Done] = []
        while self._done:
            ended.append(self._done.popleft())
        return ended

    def close(self) -> None:
        self._closing = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(CLOSING)

    # Of subclasses

    def _claim(self, job: Job) -> None:
        """What is to be read stays where it is; called with the lock."""
        for identity in job.identities if job.salt is None else []:
            slot = self.slots.use(identity)
            if slot is None:
                break
            job.slots.append(slot)

    def _salt_name(self, salt: str) -> str:
        """What the salt is called here."""
        return salt

    def _dropped(self, slots: list[int]) -> None:
        """Nobody may ever find what they hold; called with the lock."""

    def _make_room(self, count: int) -> None:
        """Slots for so many blocks are about to be taken."""

    def _write_one(self, identity: bytes, salt: str, block: int, slot: int) -> None:
        """Copy a block to a slot."""
        raise NotImplementedError

    def _read_some(self, identities: list[bytes], slots: list[int], blocks: list[int]) -> int:
        """Copy slots to blocks; how many leading ones are whole."""
        raise NotImplementedError

    # In threads

    def _ask(self, identities: list[bytes], blocks: list[int], salt: str | None) -> int | None:
        with self.lock:
            if len(self._open) >= self.most_waiting or self._closing:
                return None
            self._number += 1
            job = Job(self._number, identities, blocks, salt)
            self._claim(job)
            self._open[job.ticket] = job
        self._queue.put(job)
        return job.ticket

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not isinstance(job, Job):
                job()
                continue
            started = time.perf_counter()
            try:
                arrived, failure = self._do(job) if self.finishes or not self._closing else (0, "the tier was closed")
            except Exception as error:  # whatever happens to a copy, its blocks have to come back
                arrived, failure = 0, f"{type(error).__name__}: {error}"
            with self.lock:
                del self._open[job.ticket]
                for identity, slot in zip(job.identities, job.slots):
                    self.slots.done(identity, slot)
            self._done.append(Done(job.ticket, arrived, time.perf_counter() - started, failure))
            self.bell.ring()

    def _do(self, job: Job) -> tuple[int, str | None]:
        try:
            if job.salt is not None:
                return self._do_write(job, job.salt)
            count = len(job.slots)
            whole = self._read_some(job.identities[:count], job.slots, job.blocks[:count]) if count else 0
        except (TransferFailed, OSError) as error:
            return 0, str(error)
        if whole < count:
            with self.lock:
                self.slots.drop(job.identities[whole])
            return whole, f"what was held of block {job.identities[whole].hex()[:8]} is damaged"
        return whole, None

    def _do_write(self, job: Job, salt: str) -> tuple[int, str | None]:
        self._make_room(len(job.identities))
        for number, (identity, block) in enumerate(zip(job.identities, job.blocks, strict=True)):
            with self.lock:
                if identity in self.slots or identity in job.dropped:
                    continue
                slot = self.slots.take(self._salt_name(salt), time.monotonic())
            if slot is None:
                return number, None  # everything is in use: what does not fit is not kept
            kept = False
            try:
                self._write_one(identity, salt, block, slot)
                kept = True
            except (TransferFailed, OSError) as error:
                return number, str(error)
            finally:
                with self.lock:
                    if kept and identity not in job.dropped:
                        self.slots.keep(identity, self._salt_name(salt), slot)
                    else:
                        self.slots.give_back(slot)
                        if kept:
                            self._dropped([slot])
        return len(job.identities), None
