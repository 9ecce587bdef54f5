"""The processes in which rungs are measured: one for each, or one for all of them where a new start costs too much."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tokenmill.bench.peers.host import CHECKOUT, WorkerProcess

Report = Callable[[int, int, str], None]
Asked = Callable[[str, dict[str, Any], dict[str, Any], str, Report], dict[str, Any]]


class RungWorker(WorkerProcess):
    """A running `ladder_worker`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tokenmill.bench.ladder_worker"]
        super().__init__(command, {"PYTHONPATH": os.pathsep.join([CHECKOUT, *sys.path])})

    def ask(
        self, model: str, options: dict[str, Any], question: dict[str, Any], title: str, report: Report
    ) -> dict[str, Any]:
        self.send({"model": model, "options": options, **question})
        while "found" not in (said := self.receive()):
            report(said["done"], said["of"], title if said["what"] is None else said["what"])
        return dict(said["found"])


@contextlib.contextmanager
def workers(shared: bool) -> Iterator[Asked]:
    """A function that asks a worker. `shared`: the same one every time, until it fails."""
    alive: list[RungWorker] = []

    def ask(*question: Any) -> dict[str, Any]:
        if not alive:
            alive.append(RungWorker())
        ended = True
        try:
            found = alive[0].ask(*question)
            ended = not shared
            return found
        finally:
            if ended:
                alive.pop().close()

    try:
        yield ask
    finally:
        for worker in alive:
            worker.close()
