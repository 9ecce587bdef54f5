"""The bar that tells what is being done, and how far it is, while a model is loaded in a program of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.engine.checkpoints import Progress

DELAY = 1.0  # seconds: whatever is over by then needs no bar


@contextmanager
def loading_bar(progress: Progress | None) -> Iterator[Progress | None]:
    """The callback that was given; or where none was, one that shows a bar, if somebody sits at a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield progress
        return
    if progress is not None:
        yield progress
        return
    bars: dict[str, Any] = {}  # the one of what is being done now

    def show(done: int, total: int, what: str) -> None:
        if what not in bars:
            close()
            bars[what] = tqdm(
                desc=what,
                total=total or None,
                unit_scale=True,
                delay=DELAY,
                leave=False,
                dynamic_ncols=True,
                disable=None,
            )
        bars[what].update(done - bars[what].n)

    def close() -> None:
        while bars:
            bars.popitem()[1].close()

    try:
        yield show
    finally:
        close()
