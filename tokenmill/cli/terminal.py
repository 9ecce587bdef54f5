"""What the commands print: text to stdout; notes and progress to stderr, as bars only where someone is watching."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Report = Callable[[int, int, str], None]  # (done, total, what): bytes of a download, tensors of a load

QUICK = 0.3  # seconds: whatever is over by then needs no progress bar
STARTING = "starting"  # what is shown until something else is reported
SLOW = 5.0  # seconds: whatever takes longer is mentioned in a log, once
EVERY = 5.0  # seconds between two lines of a log about what takes minutes

# Models can be made to write escape sequences that reprogram a terminal; tabs and newlines are all a text needs.
_CONTROL = {code: None for code in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}


def forgive_encodings() -> None:
    """Show a question mark for what the terminal cannot show or what is no text, instead of failing."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write(text: str) -> None:
    """Stream a piece of model text to stdout at once."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """One line to stderr, so that stdout holds nothing but the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def check_writable(*files: Path | None, folder: Path | None = None) -> None:
    """Refuse a file or folder for results that cannot be made, before hours are spent on what goes into it."""
    for file in files:
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise ConfigError(f"{file} cannot be written; name a file in a folder that is there")
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}; name another one") from None


def size(num_bytes: float) -> str:
    """98362432 -> "98.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


@contextmanager
def progress(every: float | None = None) -> Iterator[Report]:
    """A progress callback, silent for whatever is quick. In a log it gives one line, or one `every` so many seconds."""
    reporter = _Bars() if sys.stderr.isatty() else _Lines(every)
    try:
        yield reporter.report
    finally:
        reporter.close()


class _Bars:
    """One bar per thing that is under way; the bars vanish when all is done. Until anything is reported, which may take
    as long as the import of torch, there is one that says so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._newest = 0, 0, STARTING
        self._timer = threading.Timer(QUICK, self._show)
        self._timer.daemon = True
        self._timer.start()

    def report(self, done: int, total: int, what: str) -> None:
        with self._lock:
            self._newest = done, total, what
            if self._progress is not None:
                self._update()

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._progress is not None:
                self._progress.stop()

    def _show(self) -> None:
        with self._lock:
            if not self._timer.finished.is_set():
                self._progress = _rich_progress()
                self._progress.start()
                self._update()

    def _update(self) -> None:
        assert self._progress is not None
        done, total, what = self._newest
        if what != STARTING and STARTING in self._tasks:
            self._progress.remove_task(self._tasks.pop(STARTING))
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total or None)
        self._progress.update(self._tasks[what], completed=done, total=total or None)


def _rich_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    # The description is shown as it is: a model name may contain what rich takes for markup.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


class _Lines:
    """For logs: one plain line for each thing that takes long, or one now and then that says how far it is."""

    def __init__(self, every: float | None) -> None:
        self._every = every
        self._began: dict[str, float] = {}  # or when it was last told, with `every`
        self._told: set[str] = set()

    def report(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        waited = now - self._began.setdefault(what, now)
        if self._every is not None:
            if waited >= self._every:
                self._began[what] = now
                note(f"({what}: {done} of {total})")
        elif waited >= SLOW and what not in self._told:
            self._told.add(what)
            note(f"({what} ...)")

    def close(self) -> None:
        pass
