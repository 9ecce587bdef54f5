"""Jobs on a journal go on where they were, with the answers that they had."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from journal_disks import FullDisk

from tokenmill.errors import InvalidRequest
from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import Journal, JournalFull


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
        disk = FullDisk(monkeypatch, journal.size + 5)
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
