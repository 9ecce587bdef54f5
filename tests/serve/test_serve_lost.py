"""What a disk did not take is never told as kept, also where the kernel says so only once."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import math
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenmill.errors import ConfigError
from tokenmill.serve.api import batches
from tokenmill.serve.http.batch_runner import BatchRunner
from tokenmill.serve.storage import journal as journal_module
from tokenmill.serve.storage.jobs import Job, JobStore
from tokenmill.serve.storage.journal import Journal, JournalFull

ABOUT = msgspec.json.encode({"kind": "batch", "endpoint": "/v1/completions"})


def break_disk(monkeypatch: pytest.MonkeyPatch, times: float = math.inf) -> None:
    """The next fsyncs fail. Like a kernel, it tells of an error once and then knows nothing of it."""
    fsync, calls = os.fsync, itertools.count()

    def bad(file: int) -> None:
        if next(calls) < times:
            raise OSError(errno.EIO, "Input/output error")
        fsync(file)

    monkeypatch.setattr(journal_module.os, "fsync", bad)


def items(count: int) -> list[bytes]:
    return [msgspec.json.encode({"custom_id": str(number), "body": {}}) for number in range(count)]


async def ask(job: Job, endpoint: str, body: bytes) -> tuple[int, float | None, bytes]:
    await asyncio.sleep(0)
    return 200, None, b"{}"


def test_an_error_that_nobody_waited_for_is_told_to_whoever_asks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    with Journal(tmp_path / "journal", clock=lambda: now[0]) as journal:
        break_disk(monkeypatch, times=1)
        now[0] = 5.0
        journal.append(b"one")  # and begins an fsync of its own
        assert journal._running is not None
        journal._running.result()
        assert journal.lost and "Input/output error" in caplog.text
        size = journal.size
        for _ in range(2):
            with pytest.raises(JournalFull, match=r"Input/output error.*start again"):
                asyncio.run(journal.flushed())
            with pytest.raises(JournalFull):
                journal.flush()
            with pytest.raises(JournalFull):
                journal.append(b"two")
        assert journal.size == size
        journal.rewrite([b"one"])
        journal.append(b"three")
        asyncio.run(journal.flushed())
        assert not journal.lost
    with Journal(tmp_path / "journal") as journal:
        assert journal.recovered == [b"one", b"three"]


def test_a_flush_that_failed_is_not_mended_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path / "journal") as journal:
        journal.append(b"one")
        break_disk(monkeypatch, times=1)
        for _ in range(2):
            with pytest.raises(JournalFull):
                journal.flush()


def test_a_flush_waits_for_the_fsync_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at a time only one would be told of the error."""
    entered, go, now = threading.Event(), threading.Event(), [0.0]
    calls: list[int] = []

    def fsync(file: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            entered.set()
            assert go.wait(20)
            raise OSError(errno.EIO, "Input/output error")

    with Journal(tmp_path / "journal", clock=lambda: now[0]) as journal:
        monkeypatch.setattr(journal_module.os, "fsync", fsync)
        now[0] = 5.0
        journal.append(b"one")
        assert entered.wait(20)
        threading.Timer(0.1, go.set).start()
        with pytest.raises(JournalFull):
            journal.flush()
        assert len(calls) == 1


@pytest.mark.parametrize("what", ["descriptor", "thread"])
def test_an_append_that_cannot_sync_later_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def no_descriptor(file: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    now = [0.0]
    with Journal(tmp_path / "journal", clock=lambda: now[0]) as journal:
        store = JobStore(journal)
        now[0] = 5.0
        open_before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            if what == "descriptor":
                patch.setattr(journal_module.os, "dup", no_descriptor)
            else:
                patch.setattr(threading.Thread, "start", no_thread)
            store.create("a", [b"1"])
            assert set(store.jobs) == {"a"}
            if what == "thread":
                with pytest.raises(JournalFull, match="start new thread"):
                    asyncio.run(store.flushed())
        store.create("b", [b"2"])  # tries again
        assert journal._running is not None
        asyncio.run(store.flushed())
        assert len(os.listdir("/proc/self/fd")) == open_before
    with Journal(tmp_path / "journal") as journal:
        assert set(JobStore(journal).jobs) == {"a", "b"}


def test_an_opened_journal_is_on_the_disk_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(journal_module.os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    for _ in range(2):  # what a killed process left may be with the kernel only
        Journal(tmp_path / "new" / "journal").close()
        assert synced == [str(tmp_path / "new" / "journal"), str(tmp_path / "new")]
        synced.clear()
    monkeypatch.undo()
    break_disk(monkeypatch)
    with pytest.raises(ConfigError, match="Input/output error"):
        Journal(tmp_path / "journal")
    monkeypatch.undo()
    Journal(tmp_path / "journal").close()  # nothing holds the lock


def test_a_rewrite_without_descriptors_or_folder_is_a_journal_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_folder(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Journal(tmp_path / "journal") as journal:
        journal.append(b"one")
        with monkeypatch.context() as patch, pytest.raises(JournalFull, match="Too many"):
            patch.setattr(journal_module.os, "open", no_descriptor)
            journal.rewrite([b"two"])
        assert not journal.lost
        with monkeypatch.context() as patch, pytest.raises(JournalFull, match="Input/output"):
            patch.setattr(journal_module, "_sync_folder", no_folder)
            journal.rewrite([b"three"])
        with pytest.raises(JournalFull):  # it would be lost with the machine, which may find the old file
            journal.append(b"four")
        journal.rewrite([b"three"])
    with Journal(tmp_path / "journal") as journal:
        assert journal.recovered == [b"three"]


def test_a_removal_holds_although_its_space_cannot_be_won_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.serve.storage.jobs.WASTE", 100)
    with Journal(tmp_path / "journal") as journal:
        store = JobStore(journal)
        store.create("a", [b"x" * 500])
        break_disk(monkeypatch)
        store.remove("a")
        assert not store.jobs and not journal.lost
        monkeypatch.undo()
    with Journal(tmp_path / "journal") as journal:
        assert not JobStore(journal).jobs


def test_a_job_that_is_not_on_the_disk_is_not_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: JobStore) -> None:
        store.create("a", [b"1"])
        await store.flushed()
        break_disk(monkeypatch, times=1)
        await store.flushed()  # nothing is new
        job, other = store.create("b", [b"2"]), store.create("c", [b"3"])
        for _ in range(2):  # whoever asks again is told again
            with pytest.raises(JournalFull, match="Input/output error"):
                await store.flushed()
        for _ in range(2):  # the second time it is gone already, as one that was deleted meanwhile
            with pytest.raises(JournalFull):
                await batches._kept(store, job)
        assert set(store.jobs) == {"a", "c"} and store.counts[""] == 2
        with pytest.raises(JournalFull):
            await batches._kept(store, other)

    store = JobStore(Journal(tmp_path / "journal"))
    asyncio.run(scenario(store))
    store.close()  # the disk is well again
    with Journal(tmp_path / "journal") as journal:
        assert set(JobStore(journal).jobs) == {"a"}


@pytest.mark.parametrize("interval", [0.0, 60.0], ids=["every-append", "at-the-end"])
def test_a_batch_stops_where_the_disk_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interval: float
) -> None:
    caplog.set_level(logging.INFO, "tokenmill.serve")

    async def work(store: JobStore, job: Job) -> None:
        batches = BatchRunner(store, ask)
        batches.begin(job)
        await asyncio.wait_for(batches._tasks[job.id], 20)

    store = JobStore(Journal(tmp_path / "journal", interval=interval))
    job = store.create("batch", items(4), ABOUT)
    asyncio.run(store.flushed())
    break_disk(monkeypatch)
    asyncio.run(work(store, job))
    assert job.how is None and "batch batch stops" in caplog.text and "batch completed" not in caplog.text
    monkeypatch.undo()
    store.close()
    store = JobStore(Journal(tmp_path / "journal"))
    [job] = store.unfinished()
    asyncio.run(work(store, job))
    assert job.how == "completed" and len(job.answers) == 4 and "batch completed" in caplog.text
    store.close()


def test_a_batch_goes_on_without_threads_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when there is one again: at the next start, without asking anything twice."""

    async def work(store: JobStore, job: Job) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store._journal._thread, "submit", no_thread)  # type: ignore[union-attr]
            batches = BatchRunner(store, ask)
            batches.begin(job)
            await asyncio.wait_for(batches._tasks[job.id], 20)

    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    store = JobStore(Journal(tmp_path / "journal", interval=0.0))
    job = store.create("batch", items(4), ABOUT)
    asyncio.run(store.flushed())
    asyncio.run(work(store, job))
    assert len(job.answers) == 4 and job.how is None
    store.close()
    with Journal(tmp_path / "journal") as journal:
        assert len(JobStore(journal).jobs["batch"].answers) == 4


def test_a_cancel_that_failed_is_not_confirmed_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(store: JobStore, job: Job) -> None:
        batches = BatchRunner(store, ask)
        break_disk(monkeypatch, times=1)
        for _ in range(2):
            with pytest.raises(JournalFull):
                await batches.cancel(job)
        assert job.how == "cancelled"

    store = JobStore(Journal(tmp_path / "journal"))
    asyncio.run(scenario(store, store.create("batch", items(1), ABOUT)))
    store.close()
    with Journal(tmp_path / "journal") as journal:
        assert JobStore(journal).jobs["batch"].how == "cancelled"
