"""PlainForwarder: requests that a router sends on once, or to every replica, without a look at what they are about."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

import msgspec
from starlette.requests import Request
from starlette.types import Message, Send

from tokenmill.errors import ConfigError
from tokenmill.routing.routers import NobodyOpen
from tokenmill.serve.errors import HttpError
from tokenmill.serve.router.client import ReplicaLost, StaleConnection
from tokenmill.serve.router.exchange import (
    BrokenOff,
    Refusal,
    client_of,
    headers_for_replica,
    pass_on,
    send_whole,
    target_of,
)
from tokenmill.serve.router.fleet import Fleet
from tokenmill.serve.router.replica import Replica

MOST_HOMES = 100_000  # stored responses and sessions of which the router knows where they are


class Homes:
    """Stored response or session -> address of the replica that keeps it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def of(self, name: str | None) -> str | None:
        return self._known.get(name or "")

    def remember(self, name: str, url: str) -> None:
        self._known[name] = url
        while len(self._known) > MOST_HOMES:
            self._known.popitem(last=False)

    def items(self) -> list[tuple[str, str]]:
        return list(self._known.items())


class _Opened(msgspec.Struct):
    id: str


class PlainForwarder:
    def __init__(self, fleet: Fleet, homes: Homes) -> None:
        self.fleet = fleet
        self._settings = fleet.settings
        self._homes = homes

    async def plain(self, request: Request, body: bytes, send: Send, home: bool = False) -> None:
        """Anything else: to any replica, or where this client's files are. What changes something is sent once."""
        without: set[Replica] = set()
        headers = headers_for_replica(request, self._settings.http)
        name = request.scope["path"].removeprefix("/v1/responses/").removeprefix("/v1/sessions/").partition("/")[0]
        found = self._homes.of(name)
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
                    replica = self.fleet.home(client_of(request))
                else:
                    replica = self.fleet.any_open(without)
            except NobodyOpen as error:
                raise HttpError(503, str(error), "no_replica", retry_after=5.0) from None
            except ConfigError:  # it was removed, with what it kept: others say that they do not have it
                found = None
                continue
            try:
                reply = await replica.pool.request(
                    request.method.encode(), target_of(request), headers, body, fresh=not again
                )
                with contextlib.closing(reply):
                    await pass_on(reply, watched)
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
        headers = headers_for_replica(request, self._settings.http)
        while True:
            try:
                replica = self.fleet.any_open(without)
            except NobodyOpen as error:
                raise HttpError(503, str(error), "no_replica", retry_after=5.0) from None
            try:
                reply = await replica.pool.request(b"POST", target_of(request), headers, body, fresh=True)
                with contextlib.closing(reply):
                    answer = Refusal(reply.status, reply.headers, await reply.whole())
            except ReplicaLost:
                without.add(replica)
                continue
            if answer.status == 200:
                self._homes.remember(msgspec.json.decode(answer.body, type=_Opened).id, replica.url)
            await send_whole(send, answer)
            return

    async def everywhere(self, request: Request, body: bytes, send: Send) -> None:
        """To every replica that is there: what all of them are to do."""
        headers, target = headers_for_replica(request, self._settings.http), target_of(request)
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
        await send_whole(send, worst)
