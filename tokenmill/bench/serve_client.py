"""A small HTTP client for load: notes when which bytes came, and reads them when nobody is being timed any more.

It knows nothing of the server but HTTP and OpenAI's events. On a machine that serves and asks at once every cycle of
the client is taken from the server: nothing is parsed while answers are on their way, and the client does not get up
for every single piece.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import ssl
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tokenmill.bench.figures import Answer
from tokenmill.errors import ConfigError

DOZE = 0.001  # seconds: how much later than it came a piece may be noticed
_LAST_CHUNK = b"0\r\n\r\n"
_PIECE = 1 << 16  # bytes that are read at once, into memory that is there: the loop's own way allocates for each piece

T = TypeVar("T")


@dataclass
class Exchange:
    """A request and the raw answer to it. Times are seconds of time.perf_counter."""

    meant: float = 0.0  # when it was to be sent: a server that is slow to take requests is not spared the wait
    began: float = 0.0  # when it was
    ended: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # when they came, and what
    failure: str | None = None  # of the connection: connect, disconnected, timeout


class ServerAddress:
    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; write it like http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def post(self, path: str, content: dict[str, Any]) -> bytes:
        body = json.dumps(content).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST {self.path}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n{more}"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Heard:
    """What all connections heard so far, roughly: for who watches."""

    events: int = 0


class _Dozing(selectors.DefaultSelector):
    """Waits a moment longer when something has come: what else comes until then is taken in one go."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (found := super().select(timeout)):
            return found
        time.sleep(DOZE)
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, for clients that put load on a server."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Dozing())) as runner:
        return runner.run(main)


class Connection(asyncio.BufferedProtocol):
    """One connection, kept open; one request at a time."""

    def __init__(self, place: ServerAddress, heard: Heard) -> None:
        self._place = place
        self._heard = heard
        self._buffer = memoryview(bytearray(_PIECE))
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._left: int | None = None  # bytes until the answer's end; None: it ends with the last chunk
        self._tail = b""

    async def ask(self, request: bytes, timeout: float, meant: float | None = None) -> Exchange:
        """`meant` is when the request was to be sent; None: now."""
        began = time.perf_counter()
        exchange = Exchange(began if meant is None else meant, began)
        try:
            async with asyncio.timeout(timeout):
                await self._send(request, exchange)
        except TimeoutError:
            exchange.failure = "timeout"
        except OSError:
            exchange.failure = "connect"
        exchange.ended = time.perf_counter()
        self._exchange = self._done = None
        if exchange.failure is not None:
            self.close()
        return exchange

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _send(self, request: bytes, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            place = self._place
            await loop.create_connection(lambda: self, place.host, place.port, ssl=place.tls)
        assert self._transport is not None
        self._exchange, self._done = exchange, loop.create_future()
        self._left, self._tail = None, b""
        self._transport.write(request)
        await self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        exchange, data = self._exchange, bytes(self._buffer[:count])
        if exchange is None:
            return
        if not exchange.pieces or self._left is not None:
            self._count(exchange, data)
        exchange.pieces.append((time.perf_counter(), data))
        self._heard.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if (self._left is None and self._tail == _LAST_CHUNK) or (self._left is not None and self._left <= 0):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.failure = "disconnected"
        self._transport = None
        self._end()

    def _count(self, exchange: Exchange, data: bytes) -> None:
        """An answer that says its length, as errors do, ends there."""
        if self._left is not None:
            self._left -= len(data)
            return
        head, found, rest = data.partition(b"\r\n\r\n")
        if found and (length := _fields(head).get("content-length")) is not None:
            self._left = int(length) - len(rest)

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def read(exchange: Exchange, began: float = 0.0) -> Answer:
    """What an exchange's bytes say; `began` is when the run did."""
    answer = Answer(exchange.ended - exchange.meant, start=exchange.meant - began, late=exchange.began - exchange.meant)
    status, body = _events_of(exchange)
    if exchange.failure is not None:
        answer.error = exchange.failure
    elif status != 200:
        answer.error = f"status {status}"
        answer.message = _message(b"".join(data for _, data in body))
    else:
        _read_events(answer, body)
    return answer


def _read_events(answer: Answer, events: list[tuple[float, bytes]]) -> None:
    ended = False
    for at, line in events:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            ended = True
            continue
        content = json.loads(line[6:])
        if "error" in content:
            answer.error = str(content["error"].get("code") or content["error"].get("type"))
            answer.message = str(content["error"].get("message"))
            return
        for choice in content["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if text:
                answer.text += text
                answer.times.append(at)
            answer.finish = choice["finish_reason"] or answer.finish
        if usage := content.get("usage"):
            answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    answer.output_tokens = answer.output_tokens or len(answer.times)  # a server that counts nothing: a token an event
    if not ended or answer.finish is None:
        answer.error = "no end"


def _events_of(exchange: Exchange) -> tuple[int, list[tuple[float, bytes]]]:
    """The status, and the lines of the body with the time at which each was complete."""
    data, marks = b"", []  # marks: up to which byte the data was there at which time
    for at, piece in exchange.pieces:
        data += piece
        marks.append((len(data), at - exchange.meant))
    head, _, _ = data.partition(b"\r\n\r\n")
    start, status = len(head) + 4, int(head[9:12]) if head[9:12].isdigit() else 0
    chunked = "chunked" in _fields(head).get("transfer-encoding", "")
    parts = _chunks(data, start) if chunked else [(len(data), data[start:])]
    lines: list[tuple[float, bytes]] = []
    open_line, mark = b"", 0
    for end, part in parts:
        while mark < len(marks) - 1 and marks[mark][0] < end:
            mark += 1
        *whole, open_line = (open_line + part).split(b"\n")
        lines += [(marks[mark][1], line.rstrip(b"\r")) for line in whole]
    return status, [*lines, (marks[-1][1], open_line)] if open_line else lines


def _chunks(data: bytes, start: int) -> list[tuple[int, bytes]]:
    """The chunks of a body, each with the place where it ends."""
    chunks = []
    while (line := data.find(b"\r\n", start)) >= 0:
        size = int(data[start:line].split(b";")[0] or b"0", 16)
        if size == 0:
            break
        chunks.append((line + 2 + size, data[line + 2 : line + 2 + size]))
        start = line + 4 + size
    return chunks


def _fields(head: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:]]
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _message(body: bytes) -> str:
    try:
        content = json.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace")
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("message") if isinstance(error, dict) else content)[:500]
