"""JobStore: batch jobs on a journal. What was accepted is there after a restart, with the answers it had by then."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.serve.storage.journal import Journal, JournalFull

log = logging.getLogger("tokenmill.serve")

WASTE = 64 * 1024 * 1024  # bytes of a journal below which it is not rewritten


class Created(msgspec.Struct, array_like=True, tag=1):
    """A job: its items are opaque to us (JSON lines of a batch file), and so is what its owner notes about it."""

    id: str
    at: float  # seconds since the epoch
    owner: str  # tenant
    about: bytes
    items: list[bytes]


class Answered(msgspec.Struct, array_like=True, tag=2):
    id: str
    index: int
    ok: bool
    answer: bytes


class Ended(msgspec.Struct, array_like=True, tag=3):
    id: str
    at: float
    how: str  # completed, cancelled, failed, expired


class Removed(msgspec.Struct, array_like=True, tag=4):
    id: str


JobRecord = Created | Answered | Ended | Removed

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[JobRecord] = msgspec.msgpack.Decoder(JobRecord)


@dataclass
class Job:
    id: str
    created: float
    owner: str
    about: bytes
    items: list[bytes]
    answers: dict[int, tuple[bool, bytes]] = field(default_factory=dict)  # index -> (ok, answer)
    ended: float | None = None
    how: str | None = None  # completed, cancelled, failed, expired; None while it runs

    def open_items(self) -> Iterator[tuple[int, bytes]]:
        return ((index, item) for index, item in enumerate(self.items) if index not in self.answers)

    @property
    def size(self) -> int:
        """Bytes of what was asked; answers come on top."""
        return len(self.about) + sum(map(len, self.items))

    @property
    def failed(self) -> int:
        return sum(1 for ok, _ in self.answers.values() if not ok)


class JobStore:
    """Every change is in the journal before it is in memory: JournalFull means that nothing has changed.

    Without a journal it works the same and forgets everything with the process.
    """

    def __init__(self, journal: Journal | None = None, clock: Callable[[], float] = time.time) -> None:
        self.jobs: dict[str, Job] = {}
        self.stored: Counter[str] = Counter()  # bytes by owner
        self.counts: Counter[str] = Counter()  # jobs by owner
        self._journal = journal
        self._clock = clock
        if journal is not None:
            self._recover(journal)

    def _recover(self, journal: Journal) -> None:
        """Take in what earlier processes wrote. What cannot be understood (another version's, or of a job whose own
        record was lost) is set aside."""
        strange = []
        for record in journal.recovered:
            try:
                self._apply(_decoder.decode(record))
            except (msgspec.MsgspecError, KeyError):
                strange.append(record)
        journal.recovered = []
        if not strange:
            return
        try:
            journal.set_aside(strange)
            journal.rewrite(self._records())
        except JournalFull as full:  # it is tried again at the next start
            log.error("%s", full)
        log.warning(
            "the journal %s has %d records that this tokenmill cannot use: they are in %s",
            journal.path, len(strange), journal.aside or "it still",
        )  # fmt: skip

    def create(self, id: str, items: list[bytes], about: bytes = b"", owner: str = "") -> Job:
        if id in self.jobs:
            raise InvalidRequest(f"there is a job {id!r} already; choose another id")
        self._append(Created(id, self._clock(), owner, about, items))
        return self.jobs[id]

    def answer(self, id: str, index: int, answer: bytes, ok: bool = True) -> None:
        """An item is done. The last one does not end the job: `end` does."""
        job = self._running(id)
        if not 0 <= index < len(job.items) or index in job.answers:
            raise InvalidRequest(f"job {id!r} has {len(job.items)} items; number {index} is not open")
        self._append(Answered(id, index, ok, answer))

    def end(self, id: str, how: str = "completed") -> None:
        self._running(id)
        self._append(Ended(id, self._clock(), how))

    def remove(self, id: str) -> None:
        """Forget a job; its space in the journal is won back when enough of it is waste."""
        if id not in self.jobs:
            raise InvalidRequest(f"there is no job {id!r}")
        self._append(Removed(id))
        self._tidy()

    def forget(self, id: str) -> None:
        """Remove a job of which nobody was told, if it is there, whether the journal takes that or not. Where it does
        not, and `close` cannot rewrite it either, the job may be there again after a restart."""
        if id in self.jobs:
            try:
                self._append(Removed(id))
            except JournalFull:
                self._apply(Removed(id))

    async def flushed(self) -> None:
        """Every change so far is on the disk when this returns. Raises JournalFull; what was changed stays changed."""
        if self._journal is not None:
            await self._journal.flushed()

    def close(self) -> None:
        """Everything is on the disk when this returns, if that takes it; nothing can be changed after it."""
        if self._journal is not None:
            with contextlib.suppress(JournalFull):
                self._journal.flush()
            if self._journal.lost:  # the next process must not go on with what only the kernel's memory has
                with contextlib.suppress(JournalFull):
                    self._journal.rewrite(self._records())
            self._journal.close()

    def unfinished(self) -> list[Job]:
        """Jobs to go on with, oldest first."""
        return sorted((job for job in self.jobs.values() if job.how is None), key=lambda job: job.created)

    def _running(self, id: str) -> Job:
        job = self.jobs.get(id)
        if job is None:
            raise InvalidRequest(f"there is no job {id!r}")
        if job.how is not None:
            raise InvalidRequest(f"job {id!r} is {job.how} already")
        return job

    def _append(self, record: JobRecord) -> None:
        if self._journal is not None:
            self._journal.append(_encode(record))
        self._apply(record)

    def _apply(self, record: JobRecord) -> None:
        match record:
            case Created():
                job = self.jobs[record.id] = Job(record.id, record.at, record.owner, record.about, record.items)
                self.stored[job.owner] += job.size
                self.counts[job.owner] += 1
            case Answered():
                job = self.jobs[record.id]
                job.answers[record.index] = (record.ok, record.answer)
                self.stored[job.owner] += len(record.answer)
            case Ended():
                self.jobs[record.id].ended, self.jobs[record.id].how = record.at, record.how
            case Removed():
                if (gone := self.jobs.pop(record.id, None)) is not None:
                    self.stored[gone.owner] -= gone.size + sum(len(answer) for _, answer in gone.answers.values())
                    self.counts[gone.owner] -= 1

    def _tidy(self) -> None:
        if self._journal is None or self._journal.size < WASTE:
            return
        records = self._records()
        if 2 * sum(map(len, records)) < self._journal.size:
            with contextlib.suppress(JournalFull):  # what was removed is removed all the same
                self._journal.rewrite(records)

    def _records(self) -> list[bytes]:
        return [_encode(record) for job in self.jobs.values() for record in _history(job)]


def _history(job: Job) -> Iterator[JobRecord]:
    """The records that lead to this job."""
    yield Created(job.id, job.created, job.owner, job.about, job.items)
    for index, (ok, answer) in job.answers.items():
        yield Answered(job.id, index, ok, answer)
    if job.how is not None and job.ended is not None:
        yield Ended(job.id, job.ended, job.how)
