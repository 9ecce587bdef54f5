"""Servers for tests: the real command in a process of its own, or the HTTP side around a simulated engine."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import sim_service

from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.server import _Server, listen
from tokenmill.serve.settings import HttpSettings

OPTIONS = ["--load-format", "dummy", "--dtype", "float64", "--device", "cpu", "--max-num-seqs", "16"]


@dataclass
class Server:
    """`tokenmill serve` in a process of its own."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # what it wrote to stderr
    url: str = ""

    @classmethod
    def start(cls, model: str, *options: str) -> Server:
        command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", *OPTIONS, *options]
        server = cls(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        threading.Thread(target=server._read, daemon=True).start()
        deadline = time.monotonic() + 600  # two busy cores may take minutes for what a quiet machine does in seconds
        while not server.url and server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0 if server.url else 0.5)  # for its last words
        assert server.url, "".join(server.lines)
        return server

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.match(r"tokenmill serves \S+ at (\S+)", line):
                self.url = found[1]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(120)


@asynccontextmanager
async def http_around(service: Service, **settings: Any) -> AsyncIterator[str]:
    """The HTTP side of a server around a started service; yields its address."""
    http = HttpSettings(port=0, **settings)
    sock = listen(http.host, 0)
    address = f"http://{http.host}:{sock.getsockname()[1]}"
    server = _Server(http, service)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield address
    finally:
        await server.end(serving)


@asynccontextmanager
async def simulated(
    plan: dict[str, Any] | None = None, http: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, str]]:
    """A service with a simulated engine, and its address. It has no tokenizer: prompts are token ids."""
    async with sim_service.opened(plan, **settings) as service, http_around(service, **http or {}) as url:
        yield service, url
