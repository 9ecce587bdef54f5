"""The bench's side of the wire: one worker process with its engine, asked in JSON lines, frozen out of its turn."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill.bench.peers import OURS

SERVE = Path(__file__).with_name("serve.py")
REASON_LINES = 3  # of a dead worker's log, the last ones


class PeerFailed(Exception):
    """A worker crashed, gave an error or took too long; the message says which, and what its log said last."""


class Worker:
    """A running engine. Owns the process and what that starts; `close` ends all of them."""

    def __init__(self, python: str, driver: str, threads: int, *, name: str, serve: Path = SERVE) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        extra = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if name == OURS:
            extra["PYTHONPATH"] = str(Path(tokenmill.__file__).parents[1])  # a checkout need not be installed
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [python, str(serve), driver, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | extra,
                start_new_session=True,  # a group of its own: vLLM's helpers are frozen and ended with it
            )
        except OSError as error:
            self._log.close()
            raise PeerFailed(f"{python} cannot be run: {error.strerror}") from None
        self._unread = b""

    def ask(self, command: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """One question, one answer. After PeerFailed the worker is of no more use."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(command) from None
        line = self._read_line(command, timeout)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerFailed(f"{command}: answered {line[:80]!r}, which is no JSON") from None
        if "error" in answer:
            raise PeerFailed(f"{command}: {answer['error']}")
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

    def _read_line(self, command: str, timeout: float) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(max(end - time.monotonic(), 0)):
                    raise PeerFailed(f"{command}: no answer within {timeout:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._failure(command)
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failure(self, command: str) -> PeerFailed:
        code = self._process.wait()
        self._kill_group()  # now: later, its number may be somebody else's
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-REASON_LINES:]
        return PeerFailed(f"{command}: the worker {how}" + (f" ({' | '.join(last)})" if last else ""))

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of it may be gone
            os.killpg(self._process.pid, signal.SIGKILL)
