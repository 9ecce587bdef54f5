"""Forwarder: one request of a client, and the replicas that it is sent to until one has answered it whole."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
import time
import uuid
from collections import OrderedDict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message, Send

from tokenmill.errors import ConfigError
from tokenmill.kv.prefix import IDENTITY_BYTES
from tokenmill.routing.routers import Ask, Choice, NobodyOpen
from tokenmill.serve.errors import HttpError, shape_at
from tokenmill.serve.http.routed import ROUTE, SECRET, Progress, Prompted, Route
from tokenmill.serve.router.client import Headers, ReplicaLost, Reply, StaleConnection
from tokenmill.serve.router.fleet import Fleet
from tokenmill.serve.router.frames import FrameReader, extend
from tokenmill.serve.router.metrics import RouterMetrics
from tokenmill.serve.router.replica import Booking, Replica

log = logging.getLogger("tokenmill.router")

MOST_LOSSES = 8  # replicas in a row that are lost with a request before it says a token more: then it is the cause
MOST_HOMES = 100_000  # stored responses and sessions of which the router knows where they are
LEAST_PROBED = 512  # bytes of a body: what is shorter shares too little to ask for
LOOK_AGAIN = 0.1  # seconds, while no replica takes work
# What a 429 says where another replica may have room; Anthropic's shape has nothing that tells a tenant's limits apart.
BUSY = ("overloaded", "deadline_too_close", "rate_limit_error")
_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade", b"te", b"trailer", b"expect"}
_OURS = {ROUTE.encode(), SECRET.encode(), b"proxy-authorization", b"proxy-connection"}

_encode = msgspec.json.Encoder().encode


class Peek(msgspec.Struct):
    """What a router looks at of a body; whether it is right is the replica's to say."""

    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


class _Usage(msgspec.Struct):
    class Usage(msgspec.Struct):
        class Details(msgspec.Struct):
            cached_tokens: int = 0

        prompt_tokens_details: Details | None = None

    usage: Usage | None = None


class _Opened(msgspec.Struct):
    id: str


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


class Forwarder:
    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self.fleet = fleet
        self._settings = fleet.settings
        self._metrics = metrics
        self._homes: OrderedDict[str, str] = OrderedDict()  # stored response or session -> address of its replica

    async def generate(self, request: Request, body: bytes, send: Send) -> None:
        """An answer of a model: it is asked for until it is complete. Raises HttpError before anything was sent."""
        peek = _peek(body)
        work = _Work(Route(uuid.uuid4().hex, int(time.time()), secrets.randbits(63)), request, body, send)
        ask = await self._ask(work, peek)
        pinned = self._homes.get(peek.previous_response_id or "")
        without: set[Replica] = set()  # they could not take it, just now
        refused: list[Refusal] = []
        losses, deadline = 0, time.monotonic() + self._settings.patience_seconds
        while True:
            began = time.perf_counter()
            try:
                replica, choice = self._choose(ask, without, pinned)
            except NobodyOpen:
                busy = [one for one in refused if one.status == 429]
                if busy and not work.progress.started:
                    await work.tell(min(busy, key=lambda one: one.retry_after))
                    return
                if time.monotonic() > deadline:
                    raise HttpError(
                        503, "no replica takes work now; try again later", "no_replica", retry_after=5.0
                    ) from None
                without.clear()
                refused.clear()
                await self.fleet.turn(LOOK_AGAIN)
                continue
            self._metrics.decision.observe(time.perf_counter() - began)
            self._metrics.prompt.labels(replica.url).inc(ask.tokens)
            self._metrics.expected.labels(replica.url).inc(choice.found)
            before = work.said
            try:
                refusal = await self._attempt(work, replica, ask, choice)
            except ReplicaLost as error:
                if isinstance(error, StaleConnection):
                    work.route.attempt += 1
                    continue
                losses = 1 if work.said > before else losses + 1
                self._count_retry(work, replica, "lost", str(error))
                if losses >= MOST_LOSSES:
                    why = f"{losses} replicas in a row were lost with this request; the last one: {error}"
                    raise HttpError(502, why, "replicas_lost") from None
                without.add(replica)
                deadline = max(deadline, time.monotonic() + self._settings.patience_seconds)
                continue
            if refusal is None:
                if request.scope["path"] == "/v1/responses":
                    self._remember(f"resp_{work.route.id}", replica.url)
                return
            self._count_retry(work, replica, f"refused with {refusal.status}", "")
            refused.append(refusal)
            without.add(replica)

    async def plain(self, request: Request, body: bytes, send: Send, home: bool = False) -> None:
        """Anything else: to any replica, or where this client's files are. What changes something is sent once."""
        without: set[Replica] = set()
        name = request.scope["path"].removeprefix("/v1/responses/").removeprefix("/v1/sessions/").partition("/")[0]
        found = self._homes.get(name)
        again = request.method == "GET" or not (home or found)
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        while True:
            try:
                if found is not None:
                    replica = self.fleet.named(found)
                elif home:
                    replica = self.fleet.home(_client(request))
                else:
                    replica = self.fleet.any_open(without)
            except NobodyOpen as error:
                raise HttpError(503, str(error), "no_replica", retry_after=5.0) from None
            except ConfigError:  # it was removed, with what it kept: others say that they do not have it
                found = None
                continue
            try:
                reply = await replica.pool.request(
                    request.method.encode(), _target(request), self._headers(request), body, fresh=not again
                )
                with contextlib.closing(reply):
                    await _pass(reply, watched)
                return
            except StaleConnection:
                continue
            except ReplicaLost as error:
                if began:
                    raise BrokenOff(f"the replica was lost: {error}") from None
                if home or found or not again or len(without) + 1 >= len(self.fleet.replicas):
                    raise HttpError(502, f"the replica was lost: {error}", "replica_lost") from None
                without.add(replica)

    async def open_session(self, request: Request, body: bytes, send: Send) -> None:
        """Replicas take turns; one keeps what it opened, and the session's calls follow it there."""
        without: set[Replica] = set()
        while True:
            try:
                replica = self.fleet.any_open(without)
            except NobodyOpen as error:
                raise HttpError(503, str(error), "no_replica", retry_after=5.0) from None
            try:
                reply = await replica.pool.request(b"POST", _target(request), self._headers(request), body, fresh=True)
                with contextlib.closing(reply):
                    answer = Refusal(reply.status, reply.headers, await reply.whole())
            except ReplicaLost:
                without.add(replica)
                continue
            if answer.status == 200:
                self._remember(msgspec.json.decode(answer.body, type=_Opened).id, replica.url)
            await _send_whole(send, answer)
            return

    async def everywhere(self, request: Request, body: bytes, send: Send) -> None:
        """To every replica that is there: what all of them are to do."""
        headers, target = self._headers(request), _target(request)
        method = request.method.encode()

        async def ask(replica: Replica) -> Refusal:
            reply = await replica.pool.request(method, target, headers, body, fresh=True)
            with contextlib.closing(reply):
                return Refusal(reply.status, reply.headers, await reply.whole())

        there = [one for one in self.fleet.replicas if one.state in ("ready", "draining")]
        if not there:
            raise HttpError(503, "no replica takes work now; try again later", "no_replica", retry_after=5.0)
        answers = await asyncio.gather(*map(ask, there), return_exceptions=True)
        told = [one for one in answers if isinstance(one, Refusal)]
        if len(told) < len(answers):
            raise HttpError(502, "a replica was lost; try again", "replica_lost")
        worst = max(told, key=lambda one: one.status)
        await _send_whole(send, worst)

    # -- one attempt --------------------------------------------------------------------------------------------------

    def _choose(self, ask: Ask, without: set[Replica], pinned: str | None) -> tuple[Replica, Choice]:
        if pinned is not None:  # what it goes on from is there and nowhere else
            with contextlib.suppress(Exception):
                replica = self.fleet.named(pinned)
                if replica.open and replica not in without:
                    return replica, Choice(replica.number)
        return self.fleet.choose(ask, without)

    async def _attempt(self, work: _Work, replica: Replica, ask: Ask, choice: Choice) -> Refusal | None:
        """None: the client has its answer. Raises ReplicaLost."""
        # Once, and no more: a request that kills engines has to stay where it is found out.
        booking = Booking(max(0, ask.tokens - choice.found), movable=not work.moved)
        replica.bookings.add(booking)
        try:
            if not work.route.attempt and booking.missing >= self._settings.prefill_tokens:
                await self._prefill(work, replica, booking)
            data, route = work.data()
            headers = [*self._headers(work.request), (ROUTE.encode(), _encode(route))]
            work.route.attempt += 1
            reply = await replica.pool.request(b"POST", _target(work.request), headers, data)
            with contextlib.closing(reply):
                if reply.status != 200 or not reply.header(b"content-type").startswith(b"text/event-stream"):
                    return await self._whole(work, replica, reply)
                booking.reply = reply
                await self._stream(work, replica, reply, booking)
                self._metrics.requests.labels(replica.url, "200").inc()
                return None
        finally:
            work.moved |= replica.state == "restarting"
            replica.bookings.discard(booking)

    async def _prefill(self, work: _Work, replica: Replica, booking: Booking) -> None:
        """Have the prompt read by whoever pushes its keys and values to the replica. Whatever comes of it, the replica
        answers: it computes what did not arrive."""
        worker = self.fleet.prefill_for(replica)
        if worker is None:
            return
        reading = Booking(booking.missing, output=0)
        booking.missing = 0
        worker.bookings.add(reading)
        try:
            route = Route(work.route.id, work.route.created, 0, prefill=True)
            headers = [*self._headers(work.request), (ROUTE.encode(), _encode(route))]
            reply = await worker.pool.request(b"POST", _target(work.request), headers, work.body)
            with contextlib.closing(reply):
                await reply.whole()
            self._metrics.requests.labels(worker.url, str(reply.status)).inc()
        except ReplicaLost as error:
            self._count_retry(work, worker, "lost while it read a prompt", str(error))
        finally:
            worker.bookings.discard(reading)

    async def _whole(self, work: _Work, replica: Replica, reply: Reply) -> Refusal | None:
        answer = Refusal(reply.status, reply.headers, await reply.whole())
        self._metrics.requests.labels(replica.url, str(answer.status)).inc()
        if answer.status == 503 or (answer.status == 429 and answer.code in BUSY):
            return answer
        if answer.status == 200:
            with contextlib.suppress(ValueError):
                usage = msgspec.json.decode(answer.body, type=_Usage).usage
                if usage is not None and usage.prompt_tokens_details is not None:
                    self._metrics.cached.labels(replica.url).inc(usage.prompt_tokens_details.cached_tokens)
        await work.tell(answer)
        return None

    async def _stream(self, work: _Work, replica: Replica, reply: Reply, booking: Booking) -> None:
        reader, cached = FrameReader(), 0
        if work.said or work.progress.started:
            self._metrics.resumed.inc()
        while part := await reply.read():
            for told, content in reader.feed(part):
                if told.error == 503:
                    raise ReplicaLost("it handed the stream back")
                if told.sequences:
                    booking.missing = 0
                cached = told.cached or cached
                await work.forward(reply, content)
                extend(work.progress, told)
                work.said += sum(len(one.tokens) for one in told.sequences.values())
                if told.end:
                    self._metrics.cached.labels(replica.url).inc(cached)
                    await work.end()
                    return
        raise ReplicaLost("its stream ended before the answer did")

    # -- what is known of a request -----------------------------------------------------------------------------------

    async def _ask(self, work: _Work, peek: Peek) -> Ask:
        """The identities of its prompt, from a replica: it has tokenizer, template, tenants and their salts."""
        session = peek.prompt_cache_key or work.request.headers.get("x-session-id") or ""
        client = _client(work.request)
        key = hashlib.blake2b(client + session.encode("utf-8", "replace"), digest_size=16).digest() if session else b""
        if self._settings.policy != "cache" or len(self.fleet.replicas) < 2 or len(work.body) < LEAST_PROBED:
            return Ask(len(work.body) // 4, (), key)
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._settings.probe_seconds):
                prompted = await self._probe(work)
        except (ReplicaLost, NobodyOpen, TimeoutError, ValueError):
            beginning = work.body[:LEAST_PROBED]  # of a conversation, which grows at its end
            return Ask(len(work.body) // 4, (), key or hashlib.blake2b(client + beginning, digest_size=16).digest())
        self._metrics.probe.observe(time.perf_counter() - began)
        data = base64.b64decode(prompted.chain)
        chain = [data[at : at + IDENTITY_BYTES] for at in range(0, len(data), IDENTITY_BYTES)]
        return Ask(prompted.tokens, chain, key)

    async def _probe(self, work: _Work) -> Prompted:
        replica = self.fleet.any_open()
        route = Route(work.route.id, work.route.created, 0, probe=True)
        headers = [*self._headers(work.request), (ROUTE.encode(), _encode(route))]
        reply = await replica.pool.request(b"POST", _target(work.request), headers, work.body)
        with contextlib.closing(reply):
            body = await reply.whole()
            if reply.status != 200:
                raise ValueError(reply.status)
            return msgspec.json.decode(body, type=Prompted)

    def _headers(self, request: Request) -> Headers:
        """The client's, and what shows a replica that we are of its cluster."""
        kept = [(name, value) for name, value in request.headers.raw if name not in _HOP and name not in _OURS]
        client = request.scope.get("client")
        if client is not None:
            kept.append((b"x-forwarded-for", client[0].encode()))
        if (secret := self._settings.http.cluster_secret) is not None:
            kept.append((SECRET.encode(), secret.encode()))
        return kept

    def _count_retry(self, work: _Work, replica: Replica, reason: str, why: str) -> None:
        self._metrics.retries.labels(reason).inc()
        extra: dict[str, Any] = {"id": work.route.id, "replica": replica.url, "said": work.said, "why": why}
        log.warning("request sent elsewhere: %s", reason, extra={name: one for name, one in extra.items() if one})

    def _remember(self, response: str, url: str) -> None:
        self._homes[response] = url
        while len(self._homes) > MOST_HOMES:
            self._homes.popitem(last=False)


class _Work:
    """A request on its way, and what its client has of the answer."""

    def __init__(self, route: Route, request: Request, body: bytes, send: Send) -> None:
        self.route = route
        self.request = request
        self.body = body
        self.progress = Progress()
        self.said = 0  # tokens that the client has
        self.began = False
        self.moved = False  # away from a replica whose engine died
        self._send = send

    def data(self) -> tuple[bytes, Route]:
        """The body for the next replica, and what is said of it."""
        state = _encode(self.progress) if self.progress.started else b""
        route = msgspec.structs.replace(self.route, state=len(state))
        return state + self.body, route

    async def forward(self, reply: Reply, content: bytes) -> None:
        if not self.began:
            self.began = True
            headers = [(name, value) for name, value in reply.headers if name.lower() not in _HOP]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if content:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def tell(self, answer: Refusal) -> None:
        """A whole answer; behind the beginning of a stream, as its last event."""
        if not self.began:
            await _send_whole(self._send, answer)
            return
        await self.tell_error(answer.body)

    async def tell_error(self, body: bytes) -> None:
        named = self.request.scope["path"] in ("/v1/messages", "/v1/responses")
        part = b"event: error\ndata: %b\n\n" % body if named else b"data: %b\n\ndata: [DONE]\n\n" % body
        await self._send({"type": "http.response.body", "body": part})


async def _pass(reply: Reply, send: Send) -> None:
    """An answer as it is and as it comes. What breaks off in the middle cannot be mended: the client sees it break."""
    headers = [(name, value) for name, value in reply.headers if name.lower() not in _HOP]
    part = await reply.read()
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    while part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = await reply.read()
    await send({"type": "http.response.body", "body": b""})


async def _send_whole(send: Send, answer: Refusal) -> None:
    headers = [(name, value) for name, value in answer.headers if name.lower() not in _HOP]
    headers.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def error_body(error: HttpError, path: str) -> bytes:
    return _encode(shape_at(path)(error))


def _peek(body: bytes) -> Peek:
    try:
        return msgspec.json.decode(body, type=Peek)
    except (ValueError, RecursionError):
        return Peek()


def _client(request: Request) -> bytes:
    """Who asks, as far as a router can tell."""
    headers = request.headers
    return (headers.get("authorization") or headers.get("x-api-key") or "").encode("utf-8", "replace")


def _target(request: Request) -> bytes:
    query = request.scope.get("query_string", b"")
    path: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return path + (b"?" + query if query else b"")
