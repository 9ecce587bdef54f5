"""PromptReader: what a router knows of a request before it chooses: its session, and its prompt's identities."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time

import msgspec

from tokenmill.kv.prefix import IDENTITY_BYTES
from tokenmill.routing.routers import Ask, NobodyOpen
from tokenmill.serve.http.routed import ROUTE, Prompted, Route
from tokenmill.serve.router.client import ReplicaLost
from tokenmill.serve.router.exchange import Work, client_of, encode, headers_for_replica, target_of
from tokenmill.serve.router.fleet import Fleet
from tokenmill.serve.router.metrics import RouterMetrics

LEAST_PROBED = 512  # bytes of a body: what is shorter shares too little to ask for


class Peek(msgspec.Struct):
    """What a router looks at of a body; whether it is right is the replica's to say."""

    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None


def peek_at(body: bytes) -> Peek:
    try:
        return msgspec.json.decode(body, type=Peek)
    except (ValueError, RecursionError):
        return Peek()


class PromptReader:
    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._settings = fleet.settings
        self._metrics = metrics

    async def ask(self, work: Work, peek: Peek) -> Ask:
        """The identities of its prompt, from a replica: it has tokenizer, template, tenants and their salts."""
        session = peek.prompt_cache_key or work.request.headers.get("x-session-id") or ""
        client = client_of(work.request)
        key = hashlib.blake2b(client + session.encode("utf-8", "replace"), digest_size=16).digest() if session else b""
        if self._settings.policy != "cache" or len(self._fleet.replicas) < 2 or len(work.body) < LEAST_PROBED:
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

    async def _probe(self, work: Work) -> Prompted:
        replica = self._fleet.any_open()
        route = Route(work.route.id, work.route.created, 0, probe=True)
        headers = [*headers_for_replica(work.request, self._settings.http), (ROUTE.encode(), encode(route))]
        reply = await replica.pool.request(b"POST", target_of(work.request), headers, work.body)
        with contextlib.closing(reply):
            body = await reply.whole()
            if reply.status != 200:
                raise ValueError(reply.status)
            return msgspec.json.decode(body, type=Prompted)
