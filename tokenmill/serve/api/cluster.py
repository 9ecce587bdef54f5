"""/cluster: what a replica tells routers: how it fares, what its prefix cache holds, whose streams it has."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill import __version__
from tokenmill.routing.cache_view import CacheSnapshot
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.errors import HttpError, openai_shape
from tokenmill.serve.http.request_body import read_body
from tokenmill.serve.http.request_context import error_response, json_response
from tokenmill.serve.http.routed import PROTOCOL, Cancelled, check_peer
from tokenmill.serve.http.server_state import ServerState, server_of
from tokenmill.serve.http.sse import event

BEAT = 0.25  # seconds between two words of a replica that has nothing new
MOST_CANCELLED = 1000  # names that are heard at once
TOGETHER = 0.02  # seconds in which events are collected: a step changes little


async def events(request: Request) -> Response:
    """What a router wants to know, as server-sent events: how the replica fares several times per second, and what
    its prefix cache stores and evicts, numbered, after a snapshot."""
    server = server_of(request)
    try:
        check_peer(request, server.settings)
    except HttpError as error:
        return error_response(error, openai_shape, {})
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_told(server), headers=headers, media_type="text/event-stream")


async def _told(server: ServerState) -> AsyncIterator[bytes]:
    service, position = server.service, (0, 0)
    with service.cache_feed.followed() as news:
        while True:
            news.clear()
            parts = [event(status(server))]
            for one in service.cache_feed.since(*position):
                position = one.epoch, one.sequence
                if isinstance(one, CacheSnapshot):
                    changes = {"snapshot": _joined(one.identities)}
                else:
                    changes = {"stored": _joined(one.stored), "evicted": _joined(one.evicted)}
                parts.append(event({"epoch": one.epoch, "sequence": one.sequence, **changes}))
            yield b"".join(parts)
            stats = service.stats()
            if stats.state == "stopped" or (stats.state == "draining" and not stats.active):
                return
            await asyncio.sleep(TOGETHER)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), BEAT)


async def cancel(request: Request) -> Response:
    """Attempts at requests that a router says nobody waits for any more."""
    server = server_of(request)
    try:
        check_peer(request, server.settings)
        told = msgspec.json.decode(await read_body(request, server.settings), type=Cancelled)
        server.routed.cancel(told.names[:MOST_CANCELLED])
    except ValueError as error:
        return error_response(HttpError(400, f"the body cannot be read: {error}"), openai_shape, {})
    except HttpError as error:
        return error_response(error, openai_shape, {})
    return json_response({"status": "ok"})


async def stream(request: Request) -> Response:
    """Whether this replica has the stream of a request, or had it a moment ago."""
    server = server_of(request)
    try:
        check_peer(request, server.settings)
        if server.routed.find(request.path_params["name"]) is None:
            raise HttpError(404, "there is no such stream here", "not_found")
    except HttpError as error:
        return error_response(error, openai_shape, {})
    return json_response({"status": "ok"})


def status(server: ServerState) -> dict[str, Any]:
    """How the replica fares, and once its engine has been ready, what it serves."""
    service = server.service
    stats, facts = service.stats(), getattr(service, "facts", None)
    told = {
        "protocol": PROTOCOL,
        "version": __version__,
        "ready": service.route() is service and service.ready(),
        "state": stats.state,
        "active": stats.active,
        "queued": stats.queued,
        "ahead": service.seconds_ahead(),
        "seconds_per_token": service.seconds_per_token(),
    }
    if facts is None:
        return told
    return told | {"model": server.name_of(service), "same": _answers(service), "block_size": facts.block_size}


def _answers(service: Service) -> str:
    """What replicas must have in common to give the same answers, as one word."""
    facts, config = service.facts, service.config
    same = (
        *(facts.model, facts.vocab_size, facts.max_len, facts.eos_ids, facts.block_size),
        *(config.dtype, str(config.quantization), config.kv_cache_dtype),
    )
    return hashlib.blake2b(repr(same).encode(), digest_size=8).hexdigest()


def _joined(identities: tuple[bytes, ...]) -> str:
    return base64.b64encode(b"".join(identities)).decode()
