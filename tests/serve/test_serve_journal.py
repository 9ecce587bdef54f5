"""A journal on a disk that is full, slow, shared or broken."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from journal_disks import FullDisk, SlowDisk, read

from tokenmill.errors import ConfigError
from tokenmill.serve.storage import journal as journal_module
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import MAGIC, Journal, JournalFull


def test_a_full_disk_refuses_the_record_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    disk = FullDisk(monkeypatch, 200)
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
        FullDisk(patch, 0)
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
        FullDisk(patch, 0)
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
            FullDisk(patch, 500)
            with pytest.raises(JournalFull):
                journal.rewrite([b"y" * 400, b"z" * 400])
        journal.append(b"after")
        journal.rewrite([b"small"])
        journal.append(b"more")
        with pytest.raises(ConfigError):  # the new file is locked like the old one
            Journal(path)
    assert read(path) == [b"small", b"more"] and not list(tmp_path.glob("*.new"))


# Jobs
