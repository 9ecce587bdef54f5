"""A client's request and its answer as a router handles both: what is passed on, and how far a stream has come."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import Send

from tokenmill.serve.errors import HttpError, shape_at
from tokenmill.serve.http.event_ids import LAST_EVENT_ID
from tokenmill.serve.http.routed import ROUTE, SECRET, Progress, Route
from tokenmill.serve.router.client import Headers, Reply
from tokenmill.serve.settings import HttpSettings

_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade", b"te", b"trailer", b"expect"}
_OURS = {ROUTE.encode(), SECRET.encode(), LAST_EVENT_ID.encode(), b"proxy-authorization", b"proxy-connection"}

encode = msgspec.json.Encoder().encode


class Refusal(msgspec.Struct):
    """A whole answer of a replica that may not be the last word."""

    status: int
    headers: Headers
    body: bytes

    @property
    def retry_after(self) -> float:
        value = next((value for name, value in self.headers if name.lower() == b"retry-after"), b"")
        return float(value) if value.isdigit() else 1e9

    @property
    def code(self) -> str | None:
        try:
            found = msgspec.json.decode(self.body)["error"]
            return str(found.get("code") or found["type"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


class BrokenOff(Exception):
    """A whole answer of which the client has the beginning, and there is no more: its connection has to break, too."""


class Work:
    """A request on its way, and what its client has of the answer."""

    def __init__(self, route: Route, request: Request, body: bytes, send: Send, streamed: bool, sent: str) -> None:
        """`sent`: the id of the last event that the client has, if it came with one."""
        self.route = route
        self.request = request
        self.body = body
        self.streamed = streamed
        self.progress = Progress(sent=sent)
        self.said = 0  # tokens that the client has
        self.began = False
        self.moves = 0  # away from replicas whose engine died
        self._send = send

    def data(self, home: int) -> tuple[bytes, Route]:
        """The body for the next replica, and what is said of it."""
        state = encode(self.progress) if self.progress.started or self.progress.sent else b""
        route = msgspec.structs.replace(self.route, state=len(state), home=home)
        return state + self.body, route

    async def forward(self, reply: Reply, content: bytes) -> None:
        if not self.began:
            self.began = True
            headers = [(name, value) for name, value in reply.headers if name.lower() not in _HOP]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if content and not content.startswith(b":"):
            self.progress.sent = ""  # from here on it is known by the tokens of its frames alone
        if content:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def tell(self, answer: Refusal) -> None:
        """A whole answer; behind the beginning of a stream, as its last event."""
        if not self.began:
            await send_whole(self._send, answer)
            return
        await self.tell_error(answer.body)

    async def tell_error(self, body: bytes) -> None:
        named = self.request.scope["path"] in ("/v1/messages", "/v1/responses")
        part = b"event: error\ndata: %b\n\n" % body if named else b"data: %b\n\ndata: [DONE]\n\n" % body
        await self._send({"type": "http.response.body", "body": part})


def headers_for_replica(request: Request, settings: HttpSettings) -> Headers:
    """The client's, and what shows a replica that we are of its cluster."""
    kept = [(name, value) for name, value in request.headers.raw if name not in _HOP and name not in _OURS]
    client = request.scope.get("client")
    if client is not None:
        kept.append((b"x-forwarded-for", client[0].encode()))
    if (secret := settings.cluster_secret) is not None:
        kept.append((SECRET.encode(), secret.encode()))
    return kept


async def pass_on(reply: Reply, send: Send) -> None:
    """An answer as it is and as it comes. What breaks off in the middle cannot be mended: the client sees it break."""
    headers = [(name, value) for name, value in reply.headers if name.lower() not in _HOP]
    part = await reply.read()
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    while part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = await reply.read()
    await send({"type": "http.response.body", "body": b""})


async def send_whole(send: Send, answer: Refusal) -> None:
    headers = [(name, value) for name, value in answer.headers if name.lower() not in _HOP]
    headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def error_body(error: HttpError, path: str) -> bytes:
    return encode(shape_at(path)(error))


def client_of(request: Request) -> bytes:
    """Who asks, as far as a router can tell."""
    headers = request.headers
    return (headers.get("authorization") or headers.get("x-api-key") or "").encode("utf-8", "replace")


def target_of(request: Request) -> bytes:
    query = request.scope.get("query_string", b"")
    path: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return path + (b"?" + query if query else b"")
