"""Withdrawals: tells a replica which requests nobody waits for any more, so that they end at once.

A connection that just breaks means to a replica that its router is gone, and it keeps what it has for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from tokenmill.serve.http.routed import Cancelled
from tokenmill.serve.router.client import Headers, ReplicaLost, ReplicaPool

MOST_WAITING = 10_000  # names; what is beyond them ends when the replica gives it up itself
AT_ONCE = 500
TRIES, PAUSE, PATIENCE = 3, 0.2, 5.0  # times, seconds, seconds


class Withdrawals:
    def __init__(self, pool: ReplicaPool, headers: Callable[[], Headers]) -> None:
        self.over = False  # the router is leaving: from now on connections break without a word
        self._pool = pool
        self._headers = headers
        self._names: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str) -> None:
        if self.over or len(self._names) >= MOST_WAITING:
            return
        self._names.append(name)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._tell())

    async def stop(self) -> None:
        self.over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _tell(self) -> None:
        while self._names:
            names, self._names = self._names[:AT_ONCE], self._names[AT_ONCE:]
            body = msgspec.json.encode(Cancelled(names))
            for _ in range(TRIES):
                try:
                    async with asyncio.timeout(PATIENCE):
                        reply = await self._pool.request(b"POST", b"/cluster/cancel", self._headers(), body)
                        with contextlib.closing(reply):
                            await reply.whole()
                    break
                except (ReplicaLost, TimeoutError):  # it is gone, or hangs: it gives them up when it is back
                    await asyncio.sleep(PAUSE)
