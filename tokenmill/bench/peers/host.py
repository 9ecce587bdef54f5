"""The bench's side of the wire: processes that are asked in JSON lines, and engines in them, frozen out of turn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill.bench.peers import OURS

SERVE = Path(__file__).with_name("serve.py")
CHECKOUT = str(Path(tokenmill.__file__).parents[1])  # a checkout need not be installed
REASON_LINES = 3  # of a dead worker's log, the last ones


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerFailed(Exception):
    """A worker crashed, gave an error or took too long; the message says which, and what its log said last."""


class WorkerProcess:
    """A process that answers JSON lines. Owns it and what it starts; `close` ends all of them.

    After a WorkerFailed it is of no more use.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | env,
                start_new_session=True,  # a group of its own: vLLM's helpers are frozen and ended with it
            )
        except OSError as error:
            self._log.close()
            raise WorkerFailed(f"{command[0]} cannot be run: {error.strerror}") from None
        self._unread = b""

    def send(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # whoever reads the answer is told why there is none
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next line that it answers. Raises WorkerFailed."""
        line = self._read_line(timeout)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WorkerFailed(f"answered {line[:80]!r}, which is no JSON") from None
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def freeze(self) -> None:
        """Stop the process group: an idle engine may spin, and must not while another is timed."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process.returncode is None:
            self._kill_group()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a question that nobody was there to read
                    stream.close()

    def _read_line(self, timeout: float | None) -> bytes:
        assert self._process.stdout is not None
        end = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(None if end is None else max(end - time.monotonic(), 0)):
                    raise WorkerFailed(f"no answer within {timeout:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._failure()
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failure(self) -> WorkerFailed:
        code = self._process.wait()
        self._kill_group()  # now: later, its number may be somebody else's
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-REASON_LINES:]
        return WorkerFailed(f"the worker {how}" + (f" ({' | '.join(last)})" if last else ""))

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of it may be gone
            os.killpg(self._process.pid, signal.SIGKILL)


class PeerWorker(WorkerProcess):
    """A running engine, driven by `serve` in the environment that has it."""

    def __init__(self, python: str, driver: str, threads: int, *, name: str, serve: Path = SERVE) -> None:
        env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if name == OURS:  # whatever else is on the path stays there: tests/cpu_level holds the CPU down from there
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [CHECKOUT, os.environ.get("PYTHONPATH", "")]))
        super().__init__([python, str(serve), driver, str(threads)], env)

    def ask(self, command: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """One question, one answer."""
        self.send({"command": command, **arguments})
        try:
            return self.receive(timeout)
        except WorkerFailed as failure:
            raise WorkerFailed(f"{command}: {failure}") from None
