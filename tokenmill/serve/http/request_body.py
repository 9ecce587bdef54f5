"""Reads what a client sends: a body of bounded size in bounded time, as JSON, as one of the known requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request

from tokenmill.compat import did_you_mean
from tokenmill.errors import InvalidRequest
from tokenmill.serve.errors import GONE, HttpError, unsupported
from tokenmill.serve.http import large_json
from tokenmill.serve.settings import HttpSettings

_LINGER = 2.0  # seconds
_LARGE = 256 << 10  # bytes: decoded in a thread, so that the event loop goes on
MOST_PARTS = 200_000  # arrays and objects, members of objects, or strings


class RequestBody(msgspec.Struct, kw_only=True):
    """What a client may send to an endpoint."""

    IGNORED: ClassVar[frozenset[str]] = frozenset()  # what may be sent, and has no effect here
    REFUSED: ClassVar[dict[str, str]] = {}  # what clients may send that cannot be done here, and why


T = TypeVar("T", bound=RequestBody)


async def read_body(request: Request, settings: HttpSettings) -> bytes:
    """The whole body. Raises HttpError 413 and 408."""
    limit = settings.max_body_bytes + request.scope.get("tokenmill.state_bytes", 0)
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        await _discard(request)
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(settings.body_seconds):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(GONE, "the client left before its request was complete")
                part = message.get("body", b"")
                parts.append(part)
                size += len(part)
                if size > limit:
                    await _discard(request)
                    raise _too_large(limit)
                more = message.get("more_body", False)
    except TimeoutError:
        raise HttpError(
            408, f"the body did not arrive within {settings.body_seconds:g} s", "request_timeout", close=True
        ) from None
    return b"".join(parts)


async def _discard(request: Request) -> None:
    """Read on for a while: a connection that is closed with unread data loses the answer that was sent over it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (message := await request.receive())["type"] == "http.request" and message.get("more_body"):
                pass


async def read_request(request: Request, kind: type[T], settings: HttpSettings) -> tuple[T, list[str]]:
    """The body as a request of this kind, and the names of what it says in vain. Raises HttpError."""
    body = await read_body(request, settings)
    if state := request.scope.get("tokenmill.state_bytes", 0):  # a router's, before the client's
        request.scope["tokenmill.state"], body = body[:state], body[state:]
    request.scope["tokenmill.size"] = len(body)  # for Call.aside
    if len(body) > _LARGE:
        await asyncio.to_thread(_check_parts, body)
        return await asyncio.to_thread(parse, body, kind)
    return parse(body, kind)


def _check_parts(body: bytes) -> None:
    """Millions of small values take seconds in which even other threads stand still. Numbers and texts are quick; and a
    long text may have many of these signs, but not all of them."""
    found = dict.fromkeys((b"[", b"{", b",", b":", b'"', b'\\"'), 0)
    for begin in range(0, len(body), _LARGE):  # in parts: other threads get their turn in between
        for sign in found:
            found[sign] += body.count(sign, begin, begin + _LARGE)
    opening, braces, commas, colons, quotes, escaped = found.values()
    strings = (quotes - escaped) // 2
    inner, members = min(opening + braces, commas), min(colons, strings)
    if max(inner, members, min(strings, commas)) > MOST_PARTS:
        raise InvalidRequest(f"the body has more than {MOST_PARTS} arrays, objects, members or strings; send fewer")


def parse(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    if not body.strip():
        raise HttpError(400, "the body is empty; send a JSON object", "invalid_json")
    try:
        content = msgspec.json.decode(body) if len(body) <= _LARGE else large_json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise HttpError(400, f"the body is not valid JSON: {reason}", "invalid_json") from None
    return of_kind(content, kind)


def of_kind(content: Any, kind: type[T]) -> tuple[T, list[str]]:
    """Decoded JSON as a request of this kind."""
    if not isinstance(content, dict):
        raise HttpError(400, f"the body is a JSON {_json_name(content)}; send an object", "invalid_json")
    known = kind.__struct_fields__
    ignored = sorted(name for name in content.keys() & kind.IGNORED if content[name] is not None)
    for name in sorted(content.keys() & kind.REFUSED.keys()):
        if content[name] is not None:
            raise unsupported(f"{name} is set, but {kind.REFUSED[name]}")
    for name in content.keys() - known - kind.IGNORED - kind.REFUSED.keys():
        short = name[:60]
        message = f"there is no parameter {short!r} here; {did_you_mean(short, known)}"
        raise HttpError(400, message, "unknown_parameter", short)
    try:
        return msgspec.convert(content, kind), ignored
    except (msgspec.ValidationError, RecursionError) as error:
        message, param = _located(str(error))
        raise HttpError(400, message, "invalid_value", param) from None


def _located(message: str) -> tuple[str, str | None]:
    """msgspec's "Expected `int`, got `str` - at `$.n`" as a sentence that begins with the place."""
    found = re.fullmatch(r"(.*) - at `(?:key in )?\$\.?(.*)`", message, re.DOTALL)
    if found is None:
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing:
            return f"{missing[1]} is missing; it is required", missing[1]
        return message, None
    said, place = found[1], found[2]
    return f"{place}: {said[0].lower()}{said[1:]}", place


def _json_name(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}.get(type(value), "null")


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body has more than {limit} bytes; send less", "request_too_large", close=True)
