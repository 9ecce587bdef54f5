"""A line that lives while load is on a server: how many answers have ended, and how fast tokens come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenmill.cli.terminal import note

if TYPE_CHECKING:
    from rich.progress import Progress

Watch = Callable[[int, int, float], None]  # ended, in all, output tokens per second lately

EVERY = 10.0  # seconds between lines where nobody watches a terminal


@contextmanager
def live() -> Iterator[Callable[[str], Watch]]:
    """Yields what makes a watch for each thing that is under way."""
    shown = _Bar() if sys.stderr.isatty() else _Log()
    try:
        yield shown.watch
    finally:
        shown.close()


class _Bar:
    """One bar, for what is under way now; it vanishes in the end."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def watch(self, what: str) -> Watch:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.close()
        speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), speed)
        progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        task = progress.add_task(what, total=None, speed=0.0)
        progress.start()
        self._progress = progress
        return lambda done, total, speed: progress.update(task, completed=done, total=total, speed=speed)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class _Log:
    def __init__(self) -> None:
        self._told = time.monotonic()

    def watch(self, what: str) -> Watch:
        def tell(done: int, total: int, speed: float) -> None:
            if time.monotonic() - self._told >= EVERY:
                self._told = time.monotonic()
                note(f"({done} of {total} {what}, {speed:,.0f} tokens/s)")

        return tell

    def close(self) -> None:
        pass
