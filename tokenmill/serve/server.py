"""Runs a server from its start to its end: listens, loads, serves, drains, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable

from tokenmill.serve.app import create_app
from tokenmill.serve.engine import process_limits
from tokenmill.serve.engine_client.remote_model import Progress
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.http.listening import FLUSH_SECONDS, QuietServer, listen, shown
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.settings import HttpSettings

log = logging.getLogger("tokenmill.serve")

_SPARE_FILES = 256  # that are no connections


async def serve(
    service: Service,
    settings: HttpSettings,
    progress: Progress | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises what starting the service raises; `on_ready` is called with the address.

    The port is open while the model loads, so that whoever watches sees a live server that is not ready yet.
    """
    sock = listen(settings.host, settings.port)
    process_limits.allow_files(settings.max_connections + _SPARE_FILES)
    server = _Server(settings, service)
    services = service.and_degrade()[::-1]
    for one in services:
        one.set_engine_niceness(process_limits.niceness())
    process_limits.raise_priority()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    starting = asyncio.create_task(_start(services, progress))
    told = asyncio.create_task(_stop_signal(services))
    try:
        await asyncio.wait({starting, told, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            server.app_state.batches.start()
            gc.collect()
            gc.freeze()  # what was loaded stays: later collections need not look at it, which takes them long
            on_ready(f"http://{shown(settings.host)}:{sock.getsockname()[1]}")
            await asyncio.wait({told, serving}, return_when=asyncio.FIRST_COMPLETED)
            await _drain(server, serving, services, settings.drain_seconds)
    finally:
        starting.cancel()
        await asyncio.wait({starting})  # a start that was broken off ends its engine itself
        await server.app_state.batches.stop()
        for one in services:
            await one.stop()
        await server.end(serving)
        server.app_state.batches.store.close()
        if server.app_state.tracing is not None:
            await asyncio.to_thread(server.app_state.tracing.close)
        told.cancel()


async def _start(services: list[Service], progress: Progress | None) -> None:
    for service in services:
        await service.start(progress)


async def _stop_signal(services: list[Service]) -> None:
    """Returns when the process is told to leave; told again, it hands back what runs at once."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await told.wait()
    hurried: list[asyncio.Task[int]] = []  # somebody must hold a task
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: hurried.extend(loop.create_task(one.drain(0)) for one in services))


async def _drain(server: _Server, serving: asyncio.Task[None], services: list[Service], seconds: float) -> None:
    active = sum(one.stats().active for one in services)
    log.info("draining; a second Ctrl-C or SIGTERM ends at once", extra={"active": active, "seconds": seconds})
    draining = asyncio.gather(*(one.drain(seconds) for one in services))
    await asyncio.sleep(0)  # from here on requests are refused, and then the listening socket is closed
    server.leave.set()
    handed_back = sum(await draining)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(serving), FLUSH_SECONDS)
    log.info("drained", extra={"handed_back": handed_back})


class _Server(QuietServer):
    def __init__(self, settings: HttpSettings, service: Service) -> None:
        app = create_app(service, settings)
        self.app_state: ServerState = app.state.server
        super().__init__(app, settings)
