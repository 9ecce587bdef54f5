"""Forwarder: one request of a client, and the replicas that it is sent to until one has answered it whole."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Send

from tokenmill.errors import InvalidRequest
from tokenmill.routing.routers import Ask, Choice, NobodyOpen
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.event_ids import LAST_EVENT_ID, Position, position_of
from tokenmill.serve.http.routed import ROUTE, Route
from tokenmill.serve.router.client import ReplicaLost, Reply, StaleConnection
from tokenmill.serve.router.exchange import Refusal, Work, encode, headers_for_replica, target_of
from tokenmill.serve.router.fleet import Fleet
from tokenmill.serve.router.frames import FrameReader, extend
from tokenmill.serve.router.metrics import RouterMetrics
from tokenmill.serve.router.plain import Homes
from tokenmill.serve.router.prompts import Peek, PromptReader, peek_at
from tokenmill.serve.router.replica import Booking, Replica

log = logging.getLogger("tokenmill.router")

MOST_LOSSES = 8  # replicas in a row that are lost with a request before it says a token more: then it is the cause
MOST_MOVES = 3  # times that a stream leaves a replica because its engine died
LOOK_AGAIN = 0.1  # seconds, while no replica takes work
# What a 429 says where another replica may have room; Anthropic's shape has nothing that tells a tenant's limits apart.
BUSY = ("overloaded", "deadline_too_close", "rate_limit_error")


class _Usage(msgspec.Struct):
    class Usage(msgspec.Struct):
        class Details(msgspec.Struct):
            cached_tokens: int = 0

        prompt_tokens_details: Details | None = None

    usage: Usage | None = None


class Forwarder:
    def __init__(self, fleet: Fleet, metrics: RouterMetrics, homes: Homes) -> None:
        self.fleet = fleet
        self._settings = fleet.settings
        self._metrics = metrics
        self._homes = homes
        self._prompts = PromptReader(fleet, metrics)

    async def generate(self, request: Request, body: bytes, send: Send) -> None:
        """An answer of a model: it is asked for until it is complete. Raises HttpError before anything was sent."""
        peek = peek_at(body)
        position = _last_event(request, peek)
        if position is None:
            route = Route(uuid.uuid4().hex, int(time.time()), secrets.randbits(63))
        else:  # by whichever router it went so far, this is an attempt of which it knew nothing
            route = Route(position.request, position.created, position.seed, attempt=1 + secrets.randbits(40))
        sent = request.headers.get(LAST_EVENT_ID, "") if position is not None else ""
        work = Work(route, request, body, send, bool(peek.stream), sent)
        ask = await self._prompts.ask(work, peek)
        pinned = self._homes.of(peek.previous_response_id)
        if position is not None:
            self._metrics.continued.inc()
            pinned = await self.fleet.holder(position) or pinned
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
                # The name of one that goes on is the client's word, by which it could move another's response.
                if request.scope["path"] == "/v1/responses" and position is None:
                    self._homes.remember(f"resp_{work.route.id}", replica.url)
                return
            self._count_retry(work, replica, f"refused with {refusal.status}", "")
            refused.append(refusal)
            without.add(replica)

    def _choose(self, ask: Ask, without: set[Replica], pinned: str | None) -> tuple[Replica, Choice]:
        if pinned is not None:  # what it goes on from is there and nowhere else
            with contextlib.suppress(Exception):
                replica = self.fleet.named(pinned)
                if replica.open and replica not in without:
                    return replica, Choice(replica.number)
        return self.fleet.choose(ask, without)

    async def _attempt(self, work: Work, replica: Replica, ask: Ask, choice: Choice) -> Refusal | None:
        """None: the client has its answer. Raises ReplicaLost."""
        # A request that kills engines has to stay where it is found out: who moved must say something first.
        booking = Booking(max(0, ask.tokens - choice.found), movable=not work.moves)
        replica.bookings.add(booking)
        asked, done = "", False
        try:
            if not work.route.attempt and booking.missing >= self._settings.prefill_tokens:
                await self._prefill(work, replica, booking)
            data, route = work.data(replica.home)
            headers = [*headers_for_replica(work.request, self._settings.http), (ROUTE.encode(), encode(route))]
            asked = work.route.name
            work.route.attempt += 1
            reply = await replica.pool.request(b"POST", target_of(work.request), headers, data)
            with contextlib.closing(reply):
                if reply.status != 200 or not reply.header(b"content-type").startswith(b"text/event-stream"):
                    refusal = await self._whole(work, replica, reply)
                    done = True
                    return refusal
                booking.reply = reply
                await self._stream(work, replica, reply, booking)
                self._metrics.requests.labels(replica.url, "200").inc()
                done = True
                return None
        finally:
            if asked and not done and work.streamed:  # else the replica would take us for gone, and its client not
                replica.cancel(asked)
            work.moves += replica.state == "restarting"
            replica.bookings.discard(booking)

    async def _prefill(self, work: Work, replica: Replica, booking: Booking) -> None:
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
            headers = [*headers_for_replica(work.request, self._settings.http), (ROUTE.encode(), encode(route))]
            reply = await worker.pool.request(b"POST", target_of(work.request), headers, work.body)
            with contextlib.closing(reply):
                await reply.whole()
            self._metrics.requests.labels(worker.url, str(reply.status)).inc()
        except ReplicaLost as error:
            self._count_retry(work, worker, "lost while it read a prompt", str(error))
        finally:
            worker.bookings.discard(reading)

    async def _whole(self, work: Work, replica: Replica, reply: Reply) -> Refusal | None:
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

    async def _stream(self, work: Work, replica: Replica, reply: Reply, booking: Booking) -> None:
        reader, cached = FrameReader(), 0
        if work.said or work.progress.started:
            self._metrics.resumed.inc()
        while part := await reply.read():
            for told, content in reader.feed(part):
                if told.error == 503:
                    raise ReplicaLost("it handed the stream back")
                if told.sequences:
                    booking.missing = 0
                    booking.movable = work.moves < MOST_MOVES
                cached = told.cached or cached
                await work.forward(reply, content)
                extend(work.progress, told)
                work.said += sum(len(one.tokens) for one in told.sequences.values())
                if told.end:
                    self._metrics.cached.labels(replica.url).inc(cached)
                    await work.end()
                    return
        raise ReplicaLost("its stream ended before the answer did")

    def _count_retry(self, work: Work, replica: Replica, reason: str, why: str) -> None:
        self._metrics.retries.labels(reason).inc()
        extra: dict[str, Any] = {"id": work.route.id, "replica": replica.url, "said": work.said, "why": why}
        log.warning("request sent elsewhere: %s", reason, extra={name: one for name, one in extra.items() if one})


def _last_event(request: Request, peek: Peek) -> Position | None:
    """Where a client wants to go on that has the beginning of its stream. Raises HttpError."""
    text = request.headers.get(LAST_EVENT_ID)
    if not text:
        return None
    if not peek.stream or request.scope["path"] == "/v1/embeddings":
        why = "Last-Event-ID goes on with a stream; send the request as it was, with stream"
        raise HttpError(400, why, "invalid_value")
    try:
        return position_of(text)
    except InvalidRequest as error:
        raise HttpError(400, str(error), "invalid_value") from None
