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

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.serve.storage import journal as journal_module
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import MAGIC, Journal, JournalFull


def read(path: Path) -> list[bytes]:
    with Journal(path) as journal:
        return journal.recovered


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=8), st.data())
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
            torn = whole[:cut][max([len(MAGIC), *(end for end in ends if end <= cut)]) :]
            assert journal.cut == len(torn)
            assert (b"" if journal.aside is None else journal.aside.read_bytes()) == torn.rstrip(b"\0")
            journal.append(b"after")
        assert read(path) == [*survivors, b"after"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), min_size=2, max_size=6), st.data())
def test_a_damaged_byte_costs_no_record_before_it_and_no_record_is_taken_for_another(records: Any, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        ends = []
        with Journal(path) as journal:
            for record in records:
                journal.append(record)
                ends.append(journal.size)
        whole = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
        with Journal(path) as journal:
            found = journal.recovered
            assert journal.aside is not None or not any(whole[at : at + journal.cut])
            journal.append(b"after")
        before = [record for record, end in zip(records, ends) if end <= at] if at >= len(MAGIC) else []
        hit = len(before)  # the record with the damage
        assert found in (before, before + records[hit + 1 :], records)
        assert found != records or at < len(MAGIC)  # a beginning can be written anew
        assert read(path) == [*found, b"after"]


def test_zeros_that_a_crash_left_are_no_records(tmp_path: Path) -> None:
    """Some file systems lengthen a file before its content is there."""
    path = tmp_path / "journal"
    with Journal(path) as journal:
        store = JobStore(journal)
        store.create("a", [b"1"])
    with path.open("ab") as file:
        file.write(bytes(4096))
    with Journal(path) as journal:
        store = JobStore(journal)
        assert list(store.jobs) == ["a"] and journal.cut == 4096 and journal.aside is None
        store.create("b", [b"2"])
    path.with_name("zeros").write_bytes(bytes(64))
    with Journal(path.with_name("zeros")) as journal:
        assert journal.recovered == []
    with Journal(path) as journal, pytest.raises(ValueError, match="empty"):
        assert list(JobStore(journal).jobs) == ["a", "b"]
        journal.append(b"")


def test_what_lies_behind_a_damaged_record_is_kept_and_the_damaged_one_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        store = JobStore(journal)
        store.create("lost", [b"x" * 50])
        begin = journal.size
        store.create("kept", [b"1"])
        store.answer("lost", 0, b"of a job that nobody knows any more")
        store.answer("kept", 0, b"one")
    data = bytearray(path.read_bytes())
    data[begin - 3] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with Journal(path) as journal:
            job = JobStore(journal).jobs["kept"]
            assert job.answers == {0: (True, b"one")}
    assert "was damaged; its 3 whole records are kept" in caplog.text
    assert f"{path}.torn-1" in caplog.text and f"{path}.torn-2" in caplog.text
    assert (tmp_path / "journal.torn-1").read_bytes() == bytes(data[len(MAGIC) : begin])
    assert b"nobody knows" in (tmp_path / "journal.torn-2").read_bytes()
    assert len(list(tmp_path.glob("*.torn-*"))) == 2  # the second start had nothing to say


def test_a_journal_of_another_version_is_set_aside_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    theirs = b"tokenmill journal 12\nwhatever that may mean"
    path.write_bytes(theirs)
    with Journal(path) as journal:
        assert journal.recovered == [] and journal.aside.read_bytes() == theirs
        journal.append(b"ours")
    assert "has version 12, which is not read here" in caplog.text
    assert read(path) == [b"ours"]


def test_records_of_another_version_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        JobStore(journal).create("a", [b"1"])
        journal.append(msgspec.msgpack.encode([77, "a", "something new"]))
        journal.append(b"\xc1")
        journal.append(msgspec.msgpack.encode([1, 2, 3, 4, 5, 6]))
    with Journal(path) as journal:
        assert list(JobStore(journal).jobs) == ["a"]
    assert "3 records that this tokenmill cannot use" in caplog.text
    caplog.clear()
    with Journal(path) as journal:
        assert list(JobStore(journal).jobs) == ["a"] and not caplog.text


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_store_comes_back_from_any_damage(data: st.DataObject) -> None:
    """Bytes flipped, cut off, written over or zeroed anywhere after the beginning: what was before is there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        with Journal(path, fsync="never") as journal:
            store = JobStore(journal, clock=lambda: 1.0)
            ends = []
            for number in range(4):
                store.create(f"job{number}", [b"item"], b"{}", "me")
                store.answer(f"job{number}", 0, b"answer")
                ends.append(journal.size)
        whole = path.read_bytes()
        at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
        length = data.draw(st.integers(1, 60))
        kind = data.draw(st.sampled_from(["flip", "cut", "zero", "random", "insert"]))
        damaged = {
            "flip": lambda: whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :],
            "cut": lambda: whole[:at],
            "zero": lambda: whole[:at] + bytes(length) + whole[at + length :],
            "random": lambda: (
                whole[:at] + data.draw(st.binary(min_size=length, max_size=length)) + whole[at + length :]
            ),
            "insert": lambda: whole[:at] + data.draw(st.binary(min_size=1, max_size=60)) + whole[at:],
        }[kind]()
        path.write_bytes(damaged)
        with Journal(path, fsync="never") as journal:
            store = JobStore(journal)
            for number, end in enumerate(ends):
                if end <= at:
                    assert store.jobs[f"job{number}"].answers == {0: (True, b"answer")}
            store.create("next", [b"x"])
        with Journal(path, fsync="never") as journal:
            assert "next" in JobStore(journal).jobs


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
        journal.append(b"s")  # what is small enough still fits
        disk.room = 10_000
        journal.append(b"again")
    assert read(path) == [*kept, b"s", b"again"]


LIMITED = """
import resource, sys
from tokenmill.serve.storage.journal import Journal, JournalFull
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
    path = tmp_path / "journal"
    with Journal(path), pytest.raises(ConfigError, match=f"{path} is in use by another server") as told:
        Journal(path)
    if Path("/proc/locks").exists():
        assert f"(process {os.getpid()})" in str(told.value)
    Journal(path).close()


def test_a_disk_without_locks_is_not_said_to_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(journal_module.fcntl, "flock", refused)
    with pytest.raises(ConfigError, match="cannot be locked: No locks available"):
        Journal(tmp_path / "journal")


def test_a_journal_that_may_not_be_read_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:  # as root, which may everything
        patch.setattr(journal_module.os, "open", refused)
        with pytest.raises(ConfigError, match="cannot be opened: Permission denied; give a path"):
            Journal(tmp_path / "journal")
    monkeypatch.setattr(journal_module.os, "pread", broken)
    with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
        Journal(tmp_path / "journal")


def test_a_server_starts_on_a_full_disk_and_refuses_only_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = tmp_path / "fresh"
    with monkeypatch.context() as patch:
        Disk(patch, 0)
        with Journal(fresh) as journal:
            store = JobStore(journal)
            with pytest.raises(JournalFull, match=r"No space left on device.*free some space"):
                store.create("a", [b"1"])
            assert not store.jobs
    assert "takes no jobs (No space left on device)" in caplog.text
    with Journal(fresh) as journal:
        JobStore(journal).create("a", [b"1"])
    whole = fresh.read_bytes()
    fresh.write_bytes(torn := whole + whole[len(MAGIC) : -1])
    with monkeypatch.context() as patch:
        Disk(patch, 0)
        with Journal(fresh) as journal:  # there is no room for the torn tail: nothing is cut off, and nothing is taken
            store = JobStore(journal)
            assert list(store.jobs) == ["a"] and fresh.read_bytes() == torn
            with pytest.raises(JournalFull):
                store.create("b", [b"1"])
            store.close()
        assert fresh.read_bytes() == torn and not list(tmp_path.glob("*.torn*"))
    with Journal(fresh) as journal:
        assert list(JobStore(journal).jobs) == ["a"] and journal.aside is not None


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
    monkeypatch.setattr("tokenmill.serve.storage.jobs.WASTE", 2000)
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
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import Journal
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
