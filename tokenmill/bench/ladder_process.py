"""The processes in which rungs are measured: one for each, or one for all of them where a new start costs too much."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenmill

Report = Callable[[int, int, str], None]
Asked = Callable[[str, dict[str, Any], dict[str, Any], str, Report], dict[str, Any]]

REASON_LINES = 3  # of a dead worker's log


class WorkerFailed(Exception):
    """A rung could not be measured; the message says why."""


class Worker:
    """A running `ladder_worker`. After a failure it is of no more use."""

    def __init__(self) -> None:
        root = str(Path(tokenmill.__file__).parents[1])  # a checkout need not be installed
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill.bench.ladder_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
        )

    def ask(
        self, model: str, options: dict[str, Any], question: dict[str, Any], title: str, report: Report
    ) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"model": model, "options": options, **question}).encode() + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            said = json.loads(line)
            if "found" in said:
                return dict(said["found"])
            if "error" in said:
                raise WorkerFailed(said["error"])
            report(said["done"], said["of"], title if said["what"] is None else said["what"])
        code = process.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-REASON_LINES:]
        raise WorkerFailed(f"the process ended with code {code}" + (f" ({' | '.join(last)})" if last else ""))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def workers(shared: bool) -> Iterator[Asked]:
    """A function that asks a worker. `shared`: the same one every time, until it fails."""
    alive: list[Worker] = []

    def ask(*question: Any) -> dict[str, Any]:
        if not alive:
            alive.append(Worker())
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
