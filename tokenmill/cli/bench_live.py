"""A line that lives while load is on a server: how many answers have ended, and how fast tokens come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from tokenmill.cli.terminal import note

Watch = Callable[[int, int, float], None]  # ended, in all, output tokens per second lately

EVERY = 10.0  # seconds between lines where nobody watches a terminal


@contextmanager
def live() -> Iterator[Callable[[str], Watch]]:
    """Yields what makes a watch for each thing that is under way."""
    with ExitStack() as bar:
        yield partial(_bar, bar) if sys.stderr.isatty() else _log()


def _bar(shown: ExitStack, what: str) -> Watch:
    """One bar, for what is under way now; it vanishes in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown.close()
    speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), speed)
    progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None, speed=0.0)
    shown.enter_context(progress)
    return lambda done, total, speed: progress.update(task, completed=done, total=total, speed=speed)


def _log() -> Callable[[str], Watch]:
    """A plain line now and then."""
    told = time.monotonic()

    def tell(what: str, done: int, total: int, speed: float) -> None:
        nonlocal told
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            note(f"({done} of {total} {what}, {speed:,.0f} tokens/s)")

    return lambda what: partial(tell, what)
