"""Runs a router from its start to its end: listens, follows its replicas, forwards, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tokenmill.serve.engine import process_limits
from tokenmill.serve.http.listening import FLUSH_SECONDS, QuietServer, listen, shown
from tokenmill.serve.router.app import RouterApp
from tokenmill.serve.router.settings import RouterSettings

log = logging.getLogger("tokenmill.router")

_LOOK = 0.05  # seconds


async def route(
    settings: RouterSettings,
    on_ready: Callable[[str], None] = lambda url: None,
    keep: Callable[[RouterApp], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Route until SIGTERM or SIGINT. `on_ready` is called with the address as soon as it may be asked: requests wait
    for the first replica that is ready. `keep` runs beside it, and is cancelled at the end; where it fails, so does
    this."""
    http = settings.http
    sock = listen(http.host, http.port)
    process_limits.allow_files(3 * http.max_connections)
    app = RouterApp(settings)
    server = QuietServer(app, http)
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    app.fleet.start()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    leave = asyncio.create_task(told.wait())
    keeping = [] if keep is None else [asyncio.create_task(keep(app))]
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        on_ready(f"http://{shown(http.host)}:{sock.getsockname()[1]}")
        await asyncio.wait({leave, serving, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        for one in keeping:
            if one.done():
                await one
        app.leaving = True
        server.leave.set()  # nobody new; the connections that are there are told when they ask again
        log.info("draining; a second Ctrl-C or SIGTERM ends at once", extra={"active": app.active})
        told.clear()
        deadline = time.monotonic() + http.drain_seconds
        while app.active and time.monotonic() < deadline and not told.is_set():
            await asyncio.sleep(_LOOK)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(serving), FLUSH_SECONDS if not app.active else 0.1)
    finally:
        leave.cancel()
        for one in keeping:
            one.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await app.fleet.stop()
        await server.end(serving)
