"""QuietServer: uvicorn as servers and routers here run it; and the socket that it listens at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from tokenmill.errors import ConfigError
from tokenmill.serve.http.protocol import protocol_for
from tokenmill.serve.settings import HttpSettings

FLUSH_SECONDS = 5.0  # for the last bytes of answers that have ended


class QuietServer(uvicorn.Server):
    """Leaves signals to us, and sleeps while there is nothing to do."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_for(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(settings.idle_seconds),
                backlog=2048,
            )
        )
        self.leave = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.leave.wait()

    async def end(self, serving: asyncio.Task[None]) -> None:
        """Drop whatever is still connected."""
        self.leave.set()
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, FLUSH_SECONDS)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound. Named as TCP: asyncio sets TCP_NODELAY only on connections whose listener says so, and
    without it the kernel holds every small event back until the client has acknowledged the one before (40 ms)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen at {host}:{port} ({os.strerror(error.errno or 0)}); choose another --host or --port"
        ) from None
    return sock


def shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
