"""Ranks on other machines for tests: `tokenmill rank` as a process, and a line between that breaks as it is told."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rank_groups import children, opened

from tokenmill import LLM

PATIENCE = 240  # seconds after which something hangs, on a very busy machine, too
SECRET = "what all of these machines know"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Rank:
    """`tokenmill rank`, and what it says."""

    def __init__(self, port: int, secret: Path, *more: str, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()):
        command = [*prefix, sys.executable, "-m", "tokenmill", "rank", "--join", f"{host}:{port}"]
        command += ["--rank-secret-file", str(secret), "--threads", "1", *more]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        """Of the ranks that it has forked."""
        found = children(self.process.pid)
        return found[1:]  # behind the fork server

    def end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())


@contextmanager
def rank(port: int, secret: Path, *more: str, **others: Any) -> Iterator[Rank]:
    started = Rank(port, secret, *more, **others)
    try:
        yield started
    finally:
        started.end()


def opened_far(folder: str, parallel: str, port: int, secret: Path, **options: Any) -> LLM:
    far = {"rank_listen": f"127.0.0.1:{port}", "rank_secret_file": str(secret), "skip_tokenizer_init": True}
    return opened(folder, parallel=parallel, **far | options)


def wait_until(true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, f"waited in vain until {what}"
        time.sleep(0.01)


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive() and not failed, failed


class Wire:
    """Stands between machines and passes on what they say: until `cut`, or of each connection so many bytes."""

    def __init__(self, port: int) -> None:
        self.to, self.cuts = port, 0
        self.budget: Callable[[], int | None] = lambda: None  # bytes of the next connection; None: all
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [near, far]
            left = [self.budget()]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(*pair, left), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, left: list[int | None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if left[0] is not None:
                    data = data[: max(left[0], 0)]
                    left[0] -= len(data)
                to.sendall(data)
                if left[0] is not None and left[0] <= 0:
                    self.cuts += 1
                    break
        for one in (source, to):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def random_budget(seed: int, cuts: int) -> Callable[[], int | None]:
    """Connections that end somewhere, and after so many of them, those that do not."""
    chance, given = random.Random(seed), [0]

    def next_one() -> int | None:
        given[0] += 1
        return None if given[0] > cuts else int(10 ** chance.uniform(0, 5.3))

    return next_one


def stop(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
