"""A server of our own for the load test: started and ended here, its memory and its counters read."""

from __future__ import annotations

import contextlib
import http.client
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill.bench.peers.serve import peak_bytes, processes
from tokenmill.bench.serve_client import ServerAddress
from tokenmill.errors import TokenmillError
from tokenmill.option import as_words


@dataclass(frozen=True)
class Started:
    url: str
    process: int

    def peak_bytes(self) -> int:
        """Most memory that its processes had, one by one."""
        return sum(map(peak_bytes, processes(self.process)))


@contextlib.contextmanager
def started_server(model: str, options: dict[str, Any], seconds: float = 600.0) -> Iterator[Started]:
    """`tokenmill serve` in processes of its own, until the end of the block."""
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", "--log-level", "warning"]
    command += as_words(options)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    before: Any = None
    if threading.current_thread() is threading.main_thread():  # who is told to leave does not leave the server behind
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield Started(_address(process, seconds), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _address(process: subprocess.Popen[str], seconds: float) -> str:
    """Where a server that has just been started listens; its stderr is read on in the background."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    said: list[str] = []

    def follow() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if match := re.match(r"tokenmill serves .* at (\S+)$", line):
                found.put(match[1])
        found.put(None)

    threading.Thread(target=follow, daemon=True).start()
    try:
        url = found.get(timeout=seconds)
    except queue.Empty:
        url = None
    if url is None:
        raise TokenmillError(f"the server did not start: {''.join(said[-3:]).strip() or 'it said nothing'}")
    return url


def counters(place: ServerAddress) -> dict[str, float]:
    """What a server of ours tells at /metrics, by name; nothing where it is another's, or tells nobody."""
    kind = http.client.HTTPConnection if place.tls is None else http.client.HTTPSConnection
    connection = kind(place.host, place.port, timeout=10)
    try:
        connection.request("GET", f"{place.path}/metrics", headers=place.headers)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace") if answer.status == 200 else ""
    except (OSError, http.client.HTTPException):
        text = ""
    finally:
        connection.close()
    found = (re.match(r"(tokenmill_\w+) (\S+)$", line) for line in text.splitlines())
    return {match[1]: float(match[2]) for match in found if match is not None}
