"""EventStream: an answer sent as server-sent events while it comes into being."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from tokenmill.serve.call import Call, Lasting, told_error

DONE = b"data: [DONE]\n\n"
_COMMENT = b": still here\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: Any, name: str | None = None) -> bytes:
    if name is None:
        return b"data: %b\n\n" % _encode(content)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(content))


class EventStream(Lasting):
    """Sends the events of a generator. `last` follows an error; with `named`, an error is an event called error."""

    def __init__(
        self, call: Call, events: AsyncGenerator[bytes, None], last: bytes = DONE, named: bool = False
    ) -> None:
        super().__init__(
            status_code=200,
            headers=call.headers() | {"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._call = call
        self._events = events
        self._last = last
        self._named = named
        self._sent = 0  # how often something was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            async with self._call.watching(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                beat = asyncio.create_task(self._beat(send))
                try:
                    async for part in self._events:
                        self._sent += 1
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                except Exception as problem:
                    error = told_error(problem, self._call.id)
                    status = error.status
                    content = self._call.shape(error)
                    part = event(content, "error" if self._named else None) + self._last
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                finally:
                    beat.cancel()
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._call.close(status)
            await self._events.aclose()

    async def _beat(self, send: Send) -> None:
        """Proxies close what is silent for long."""
        while True:
            before = self._sent
            await asyncio.sleep(self._call.site.settings.beat_seconds)
            if self._sent == before:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
