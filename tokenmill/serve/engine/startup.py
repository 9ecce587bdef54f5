"""StartupProgress: what is being done to make an engine ready, and how far that is, for everybody who waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("tokenmill.serve")

STARTING = "starting the engine"
_COUNTED = 10_000  # more than this is bytes or parameters, which say less than their share


@dataclass(frozen=True, slots=True)
class StartupStage:
    """One piece of work; `total` is 0 where nobody knows how much it is."""

    name: str  # downloading, loading weights, compiling kernels, ...
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        if self.total <= 0:
            return self.name
        if self.total > _COUNTED:
            return f"{self.name}, {100 * min(self.done, self.total) // self.total} %"
        return f"{self.name}, {self.done} of {self.total}"


class StartupProgress:
    """The newest stage of an engine that is not ready. Reports may come from any thread."""

    def __init__(self) -> None:
        self.now: StartupStage | None = StartupStage(STARTING)  # None: it is ready
        self.progress: Callable[[int, int, str], None] | None = None  # of the first start: whoever sits at a terminal
        self._restart = False
        self._began = time.monotonic()

    def report(self, done: int, total: int, what: str) -> None:
        before, self.now = self.now, StartupStage(what, done, total)
        if self._restart:
            if before is None or before.name != what:
                log.info("the engine is being started: %s", self.now)
        elif self.progress is not None:
            self.progress(done, total, what)

    def ready(self) -> None:
        self.now, self._restart = None, True

    def lost(self) -> None:
        self.now, self._began = StartupStage(STARTING), time.monotonic()

    def as_json(self) -> dict[str, Any]:
        """For /health; nothing where nothing is under way."""
        if (stage := self.now) is None:
            return {}
        waited = round(time.monotonic() - self._began, 1)
        return {
            "stage": stage.name,
            "done": stage.done,
            "total": stage.total,
            "message": str(stage),
            "seconds": waited,
        }
