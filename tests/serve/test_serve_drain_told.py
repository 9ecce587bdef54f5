"""Who ends a server is told how to end it at once."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")


def test_a_drain_says_that_a_second_signal_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    from tokenmill.serve import server

    async def drain(seconds: float) -> int:
        return 0

    async def main() -> None:
        service: Any = SimpleNamespace(stats=lambda: SimpleNamespace(active=2), drain=drain)
        door: Any = SimpleNamespace(leave=asyncio.Event())
        await server._drain(door, asyncio.create_task(asyncio.sleep(0)), [service], 5.0)

    with caplog.at_level(logging.INFO, logger=server.log.name):
        asyncio.run(main())
    first: Any = caplog.records[0]
    assert "a second Ctrl-C or SIGTERM ends at once" in first.getMessage() and (first.active, first.seconds) == (2, 5.0)
