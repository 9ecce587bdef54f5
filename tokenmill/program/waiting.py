"""Waiting: how the threads of programs wait for what the engine's thread brings, or for whatever ended it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiting:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended: Exception | None = None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Until then; raises what ended it instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or ready())
            if self._ended is not None and not ready():
                raise self._ended

    def end(self, why: Exception) -> None:
        """Nobody answers any more: whoever waits is told, the first reason."""
        self._ended = self._ended or why
        self.wake()

    def wake(self) -> None:
        """Something has changed: whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()
