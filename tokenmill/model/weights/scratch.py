"""Folders for downloads that are under way, locked while their process lives, so that those of killed ones show."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PARTIAL = "partial"  # what of a download is worth going on with: kept when the rest of the folder goes

_PREFIX = "download-"
_LOCK, _UNLOCKED = "lock", "new-lock"
_UNLOCKED_SECONDS = 3600  # a folder without a lock is of a process that was killed, or is about to lock it


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder in `parent`, with what an earlier download left in PARTIAL; what is left there now is for the next."""
    parent.mkdir(parents=True, exist_ok=True)
    _clear_away(parent)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=_PREFIX))
    lock = _locked(folder / _UNLOCKED)
    with contextlib.suppress(OSError):  # under the name that others look for there is never a lock that is still open
        os.rename(folder / _UNLOCKED, folder / _LOCK)
    try:
        with contextlib.suppress(OSError):  # there is none, or another process goes on with it
            os.rename(parent / PARTIAL, folder / PARTIAL)
        yield folder
    finally:
        _remove(folder)
        _unlock(lock)


def _clear_away(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if folder.is_dir() and _is_dead(folder):
            _remove(folder)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # there is nothing, or another process left more
        os.rename(folder / PARTIAL, folder.parent / PARTIAL)
    shutil.rmtree(folder, ignore_errors=True)


def _locked(path: Path) -> int | None:
    """Hold a lock, where the system and the disk have such; the end of the process opens it in any case."""
    try:
        import fcntl

        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _is_dead(folder: Path) -> bool:
    try:
        if not (folder / _LOCK).exists():
            return time.time() - folder.stat().st_mtime > _UNLOCKED_SECONDS
    except OSError:
        return False  # it is being removed
    lock = _locked(folder / _LOCK)
    _unlock(lock)
    return lock is not None
