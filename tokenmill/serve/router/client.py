"""HTTP to replicas: pooled connections over asyncio and httptools, whose answers are read as they come.

Of its own, because httpx (a tool of the tests) is no part of what `tokenmill[serve]` installs, and uvicorn's parser
is.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from typing import Any, cast

import httptools

from tokenmill.serve.router.settings import address_of

MOST_IDLE = 256  # connections that are kept
IDLE_SECONDS = 30.0  # servers close what is idle for longer than 75
MOST_BUFFERED = 256 << 10  # bytes of an answer that nobody has taken; then the replica has to wait
MOST_HEAD = 64 << 10

Headers = list[tuple[bytes, bytes]]


class ReplicaLost(Exception):
    """A replica cannot be reached, or its answer broke off."""


class StaleConnection(ReplicaLost):
    """A connection that had been kept was closed before it brought an answer: that says nothing of the replica."""


class Reply:
    """An answer on its way. Whoever has it reads it to its end or closes it."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self._connection = connection
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._over = False
        self._problem: ReplicaLost | None = None
        self._news = asyncio.Event()

    def header(self, name: bytes) -> bytes:
        return next((value for each, value in self.headers if each.lower() == name), b"")

    async def head(self) -> None:
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """What has come since; b"" at the end. Raises ReplicaLost."""
        while not self._parts and not self._over:
            await self._wait()
        found = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._connection.resume()
        return found

    async def whole(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    def close(self, why: str = "the answer was given up") -> None:
        """Nobody wants the rest: the replica sees its client leave."""
        if not self._over:
            self._connection.abort(why)

    async def _wait(self) -> None:
        if self._problem is not None and not self._parts:
            raise self._problem
        self._news.clear()
        await self._news.wait()

    # -- what the connection tells --------------------------------------------------------------------------------

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > MOST_BUFFERED:
            self._connection.pause()
        self._news.set()

    def has_head(self, status: int) -> None:
        self.status = status
        self._news.set()

    def end(self) -> None:
        self._over = True
        self._news.set()

    def fail(self, why: str) -> None:
        if not self._over:
            self._problem = ReplicaLost(why)
            self._news.set()


class _Connection(asyncio.Protocol):
    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._paused = False
        self._head = 0
        self.closed = False
        self.idle_since = 0.0

    def send(self, data: bytes) -> Reply:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._head = Reply(self), 0
        self._transport.write(data)
        return self._reply

    def pause(self) -> None:
        if not self._paused and self._transport is not None and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    def abort(self, why: str = "the connection was given up") -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        self._lost(why)

    def _lost(self, why: str) -> None:
        self._pool.drop(self)
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.fail(why)

    # -- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._reply is None:  # nobody asked
            self.abort()
            return
        if not self._reply.status:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the replica's answer is not HTTP: {error}")
            return
        if self._head > MOST_HEAD and self._reply is not None and not self._reply.status:
            self.abort("the head of the replica's answer does not end")

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._lost("the replica closed the connection" if error is None else f"the connection broke: {error}")

    # -- the parser -------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reply is not None:
            self._reply.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._reply is not None:
            self._reply.has_head(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.add(body)

    def on_message_complete(self) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        keep = self._parser.should_keep_alive()
        self.resume()
        reply.end()
        self._pool.release(self, keep)


class ReplicaPool:
    """Connections to one replica."""

    def __init__(self, url: str, connect_seconds: float) -> None:
        self._host, self._port = address_of(url)
        self._connect_seconds = connect_seconds
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def request(self, method: bytes, target: bytes, headers: Headers, body: bytes, fresh: bool = False) -> Reply:
        """Send a request and wait for the head of its answer; with `fresh`, over a new connection. Raises ReplicaLost,
        and StaleConnection where it may be sent again."""
        lines = [b"%b: %b" % header for header in headers]
        head = b"%b %b HTTP/1.1\r\n%b\r\ncontent-length: %d\r\n\r\n" % (method, target, b"\r\n".join(lines), len(body))
        if not fresh and (kept := self._kept()) is not None:
            try:
                return await self._over(kept, head + body)
            except ReplicaLost as error:
                raise StaleConnection(str(error)) from None
        return await self._over(await self._open(), head + body)

    async def unreachable(self, seconds: float) -> str | None:
        """Why no connection can be made, if none can."""
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError) as error:
            return f"{self._host}:{self._port} takes no connection ({error or 'no answer'})"
        writer.close()
        return None

    def abort_all(self, why: str) -> None:
        """The replica is taken for dead: nobody waits for it any longer."""
        for connection in list(self._all):
            connection.abort(why)

    def release(self, connection: _Connection, keep: bool) -> None:
        if keep and len(self._idle) < MOST_IDLE and not connection.closed:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def drop(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and time.monotonic() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise ReplicaLost(f"{self._host}:{self._port} cannot be reached ({error or 'no answer'})") from None
        self._all.add(connection)
        return connection

    async def _over(self, connection: _Connection, data: bytes) -> Reply:
        if connection.closed:
            raise ReplicaLost("the connection was closed")
        reply = connection.send(data)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply
