"""A journal survives a cut at any byte, a full disk and a kill; jobs on it go on where they were."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.serve import journal as journal_module
from tokenmill.serve.jobs import JobStore
from tokenmill.serve.journal import MAGIC, Journal, JournalFull


def read(path: Path) -> list[bytes]:
    with Journal(path) as journal:
        return journal.recovered


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8), st.data())
def test_a_journal_cut_at_any_byte_gives_back_every_whole_record(records: list[bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        ends = []
        with Journal(path) as journal:
            for record in records:
                journal.append(record)
                ends.append(journal.size)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        survivors = [record for record, end in zip(records, ends) if end <= cut]
        with Journal(path) as journal:
            assert journal.recovered == survivors
            journal.append(b"after")
        assert read(path) == [*survivors, b"after"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), min_size=2, max_size=6), st.data())
def test_a_damaged_record_ends_the_journal_and_is_never_taken_for_another(records: list[bytes], data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        with Journal(path) as journal:
            for record in records:
                journal.append(record)
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
        found = read(path)
        assert found == records[: len(found)] and len(found) < len(records)


class Disk:
    """A disk with a limit, below os.pwrite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite
        monkeypatch.setattr(journal_module.os, "pwrite", self)

    def __call__(self, file: int, data: bytes, at: int) -> int:
        if at >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(file, data[: self.room - at], at)


def test_a_full_disk_refuses_the_record_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    disk = Disk(monkeypatch, 200)
    with Journal(path) as journal:
        kept = []
        with pytest.raises(JournalFull, match=r"No space left.*free some space"):
            while len(kept) < 9:
                journal.append(b"x" * 40)
                kept.append(b"x" * 40)
        assert 1 < len(kept) < 5 and path.stat().st_size == journal.size
        with pytest.raises(JournalFull):
            journal.append(b"x" * 40)
        journal.append(b"")  # what is small enough still fits
        disk.room = 10_000
        journal.append(b"again")
    assert read(path) == [*kept, b"", b"again"]


LIMITED = """
import resource, sys
from tokenmill.serve.journal import Journal, JournalFull
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
journal = Journal(sys.argv[1])
for number in range(1000):
    try:
        journal.append(b"x" * 1000)
    except JournalFull as error:
        sys.exit(f"{number} {error}")
"""


def test_a_limit_of_the_kernel_is_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writer = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert writer.stderr.startswith("4 ") and "File too large" in writer.stderr
    assert read(path) == [b"x" * 1000] * 4


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="no ordinary file"):
            Journal(path)
    with pytest.raises(ConfigError, match="directory"):
        Journal(tmp_path)


def test_fsync_follows_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(journal_module.os, "fsync", lambda file: syncs.append(file))
    now = [0.0]
    counts = {}
    for policy in ("always", "interval", "never"):
        with Journal(tmp_path / policy, fsync=policy, interval=1.0, clock=lambda: now[0]) as journal:
            assert len(syncs) == (0 if policy == "never" else 2)  # the new file and its folder
            syncs.clear()
            for _ in range(10):
                now[0] += 0.25
                journal.append(b"x")
                if journal._running is not None:  # in a thread, so that nobody waits for the disk
                    journal._running.result()
            if policy == "never":
                asyncio.run(journal.flushed())
                journal.flush()
            counts[policy] = len(syncs)
        syncs.clear()
    assert counts == {"always": 10, "interval": 2, "never": 0}
    with pytest.raises(ConfigError, match="sometimes"):
        Journal(tmp_path / "other", fsync="sometimes")


def test_a_failed_fsync_is_a_failed_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "journal"
    with Journal(path, fsync="always") as journal:
        journal.append(b"one")
        monkeypatch.setattr(journal_module.os, "fsync", broken)
        with pytest.raises(JournalFull, match="Input/output error"):
            journal.append(b"two")
        monkeypatch.undo()
        journal.append(b"three")
    assert read(path) == [b"one", b"three"]


class SlowDisk:
    """An fsync that takes as long as the test lets it, and notes how much of the file it brought to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.path, self.synced, self.count = path, 0, 0
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(journal_module.os, "fsync", self)

    def __call__(self, file: int) -> None:
        size = self.path.stat().st_size  # what comes later may be on the disk or not
        self.entered.release()
        assert self.go.acquire(timeout=20)
        self.synced, self.count = size, self.count + 1


def test_a_slow_disk_holds_up_only_those_who_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on, and one fsync serves all that came while the one before was running."""
    path = tmp_path / "journal"

    async def scenario(journal: Journal, disk: SlowDisk) -> None:
        async def kept(record: bytes) -> int:
            journal.append(record)
            end = journal.size
            await journal.flushed()
            assert disk.synced >= end, "told before it was on the disk"
            return disk.count

        first = asyncio.create_task(kept(b"first"))
        await asyncio.to_thread(disk.entered.acquire)
        others = [asyncio.create_task(kept(b"%d" % number)) for number in range(20)]
        for _ in range(50):  # of which none would come back if the loop waited
            await asyncio.sleep(0)
        assert not first.done() and not any(other.done() for other in others)
        disk.go.release()
        assert await first == 1
        await asyncio.to_thread(disk.entered.acquire)
        assert not any(other.done() for other in others), "the fsync that was running knew nothing of them"
        disk.go.release()
        assert set(await asyncio.gather(*others)) == {2}

    with Journal(path) as journal:
        asyncio.run(asyncio.wait_for(scenario(journal, SlowDisk(monkeypatch, path)), 20))
    monkeypatch.undo()
    assert len(read(path)) == 21


def test_two_servers_cannot_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal"), pytest.raises(ConfigError, match="in use by another server"):
        Journal(tmp_path / "journal")
    Journal(tmp_path / "journal").close()


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, this is a letter.")
    with pytest.raises(ConfigError, match="no journal"):
        Journal(path)
    assert path.read_text() == "Dear reader, this is a letter."


def test_a_rewrite_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for number in range(20):
            journal.append(b"%d" % number * 100)
        with monkeypatch.context() as patch:
            Disk(patch, 500)
            with pytest.raises(JournalFull):
                journal.rewrite([b"y" * 400, b"z" * 400])
        journal.append(b"after")
        journal.rewrite([b"small"])
        journal.append(b"more")
        with pytest.raises(ConfigError):  # the new file is locked like the old one
            Journal(path)
    assert read(path) == [b"small", b"more"] and not list(tmp_path.glob("*.new"))


# Jobs


def test_jobs_survive_a_restart_with_the_answers_they_had(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        store = JobStore(journal, clock=lambda: 5.0)
        store.create("a", [b"1", b"2", b"3"], about=b"notes", owner="me")
        store.create("b", [b"4"])
        store.create("c", [])
        store.answer("a", 1, b"two")
        store.answer("b", 0, b"no", ok=False)
        store.end("b", "failed")
        store.remove("c")
    with Journal(path) as journal:
        store = JobStore(journal)
        assert set(store.jobs) == {"a", "b"}
        a, b = store.jobs["a"], store.jobs["b"]
        assert (a.about, a.owner, a.created, a.how) == (b"notes", "me", 5.0, None)
        assert list(a.open_items()) == [(0, b"1"), (2, b"3")] and a.answers == {1: (True, b"two")}
        assert (b.how, b.failed, b.ended) == ("failed", 1, 5.0)
        assert store.unfinished() == [a]
        store.answer("a", 0, b"one")
        with pytest.raises(InvalidRequest, match="number 0 is not open"):
            store.answer("a", 0, b"again")
        with pytest.raises(InvalidRequest, match="failed already"):
            store.answer("b", 0, b"late")
        with pytest.raises(InvalidRequest, match="no job 'x'"):
            store.end("x")


def test_a_job_that_cannot_be_written_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path / "journal") as journal:
        store = JobStore(journal)
        store.create("a", [b"1"])
        disk = Disk(monkeypatch, journal.size + 5)
        with pytest.raises(JournalFull):
            store.create("b", [b"2" * 100])
        with pytest.raises(JournalFull):
            store.answer("a", 0, b"x" * 100)
        assert set(store.jobs) == {"a"} and not store.jobs["a"].answers
        disk.room = 10_000
        store.answer("a", 0, b"x" * 100)
    with Journal(tmp_path / "journal") as journal:
        assert JobStore(journal).jobs["a"].answers == {0: (True, b"x" * 100)}


def test_removed_jobs_give_their_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.serve.jobs.WASTE", 2000)
    with Journal(tmp_path / "journal") as journal:
        store = JobStore(journal)
        store.create("kept", [b"k"])
        store.answer("kept", 0, b"K")
        for number in range(50):
            store.create(str(number), [b"x" * 200])
            store.remove(str(number))
        assert journal.size < 5000
    with Journal(tmp_path / "journal") as journal:
        assert list(JobStore(journal).jobs) == ["kept"]


WRITER = """
import sys
from pathlib import Path
from tokenmill.serve.jobs import JobStore
from tokenmill.serve.journal import Journal
store = JobStore(Journal(sys.argv[1], fsync="never"))
job = next(iter(store.unfinished()), None) or store.create("job", [b"%d" % i for i in range(100000)])
for index, item in list(job.open_items()):
    store.answer("job", index, item * 3)
    print(index, flush=True)
"""


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    path, done = tmp_path / "journal", 0
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        for _ in range(200):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert last == done + 199
        with Journal(path) as journal:
            job = JobStore(journal).jobs["job"]
            done = len(job.answers)
            assert done > last and set(job.answers) == set(range(done))
            assert all(answer == b"%d" % index * 3 for index, (_, answer) in job.answers.items())
