"""Reading journals back, and disks with little room or time below them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tokenmill.serve.storage import journal as journal_module
from tokenmill.serve.storage.journal import Journal


def read(path: Path) -> list[bytes]:
    with Journal(path) as journal:
        return journal.recovered


class FullDisk:
    """A disk with a limit, below os.pwrite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite
        monkeypatch.setattr(journal_module.os, "pwrite", self)

    def __call__(self, file: int, data: bytes, at: int) -> int:
        if at >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(file, data[: self.room - at], at)


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
