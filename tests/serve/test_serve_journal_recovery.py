"""A journal survives a cut or damage at any byte, and what another version wrote."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_disks import read

from tokenmill.serve.storage.jobs import JobStore
from tokenmill.serve.storage.journal import MAGIC, Journal


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
