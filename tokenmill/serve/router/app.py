"""RouterApp: the router's HTTP side: what is forwarded how, its health, its metrics, and replicas that come and go."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.serve.errors import GONE, HttpError
from tokenmill.serve.http.request_body import read_body
from tokenmill.serve.http.routed import check_peer
from tokenmill.serve.router.exchange import BrokenOff, error_body
from tokenmill.serve.router.fleet import Fleet
from tokenmill.serve.router.forward import Forwarder
from tokenmill.serve.router.metrics import RouterMetrics
from tokenmill.serve.router.plain import Homes, PlainForwarder
from tokenmill.serve.router.settings import RouterSettings

log = logging.getLogger("tokenmill.router")

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
KEPT = ("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/responses/")  # in the memory of one replica
EVERYWHERE = ("/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # all replicas are told
SESSIONS = "/v1/sessions"  # what is below it goes where the session was opened
METHODS = ("GET", "POST", "DELETE", "OPTIONS")
MOST_DRAIN = 3600.0  # seconds


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    """What POST /router/replicas is to do: one of these, with an address."""

    add: str | None = None
    drain: str | None = None
    remove: str | None = None
    update: bool = False  # all of them, one after the other, where the router started them
    seconds: float = 30.0  # to wait for what a replica that is drained has


class Cluster(Protocol):
    """Who starts replicas."""

    async def update(self) -> int: ...

    def as_json(self) -> dict[str, Any]: ...


class RouterApp:
    """An ASGI application."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings)
        self.metrics = RouterMetrics(self.fleet)
        self.active = 0
        self.leaving = False
        self.cluster: Cluster | None = None  # who starts replicas, if anybody does
        self.homes = Homes()
        self._forwarder = Forwarder(self.fleet, self.metrics, self.homes)
        self._plain = PlainForwarder(self.fleet, self.homes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request, path = Request(scope, receive), scope["path"]
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        self.active += 1
        try:
            await self._serve(request, path, receive, watched)
        except BrokenOff as problem:
            log.warning("an answer broke off", extra={"path": path, "why": str(problem)})
            raise  # the server breaks the connection
        except Exception as problem:
            if isinstance(problem, HttpError):
                error = problem
            else:
                log.exception("a request failed in the router")
                error = HttpError(500, "something went wrong in the router; its log says more", "internal_error")
            if error.status != GONE:
                await self._tell(error, path, began, send)
        finally:
            self.active -= 1

    async def _tell(self, error: HttpError, path: str, began: bool, send: Send) -> None:
        body = error_body(error, path)
        if not began:
            headers = error.headers() | {"content-type": "application/json", "content-length": str(len(body))}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": error.status, "headers": raw})
            await send({"type": "http.response.body", "body": body})
            return
        named = path in ("/v1/messages", "/v1/responses")
        part = b"event: error\ndata: %b\n\n" % body if named else b"data: %b\n\ndata: [DONE]\n\n" % body
        await send({"type": "http.response.body", "body": part})

    async def _serve(self, request: Request, path: str, receive: Receive, send: Send) -> None:
        if path in ("/health", "/health/ready", "/health/live", "/metrics") or path.startswith("/router/"):
            response = await self._own(request, path)
            await response(request.scope, receive, send)
            return
        if request.method not in METHODS:
            raise HttpError(405, f"the router forwards {', '.join(METHODS)}, not {request.method[:20]}")
        if path.startswith("/cluster/"):
            raise HttpError(404, "what replicas tell routers is not forwarded; ask a replica", "not_found")
        if self.leaving:
            raise HttpError(503, "the router is shutting down; try again", "unavailable", retry_after=1.0, close=True)
        body = await read_body(request, self.settings.http)
        if request.method == "POST" and path in GENERATING:
            work = self._forwarder.generate(request, body, send)
        elif path == SESSIONS and request.method == "POST":
            work = self._plain.open_session(request, body, send)
        elif path in EVERYWHERE:
            work = self._plain.everywhere(request, body, send)
        else:
            work = self._plain.plain(request, body, send, home=path.startswith(KEPT))
        doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.metrics.cancelled.inc()
                raise HttpError(GONE, "the client left")
            await doing
        finally:
            gone.cancel()
            doing.cancel()
            await asyncio.wait({doing})

    # -- the router's own ----------------------------------------------------------------------------------------

    async def _own(self, request: Request, path: str) -> Response:
        if path == "/health/live":
            return _json({"live": True})
        if path.startswith("/health"):
            count = sum(one.open for one in self.fleet.replicas)
            ready = count > 0 and not self.leaving
            told = {
                "status": "ok" if ready else "unavailable",
                "ready": ready,
                "replicas": count,
                "active": self.active,
            }
            return _json(told, 200 if ready else 503)
        if path == "/metrics":
            return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path != "/router/replicas":
            raise HttpError(404, f"there is nothing at {path[:200]!r}", "not_found")
        if request.headers.get("origin") or request.headers.get("sec-fetch-site") not in (None, "same-origin", "none"):
            raise HttpError(403, "web pages may not ask this", "origin_not_allowed")
        check_peer(request, replace(self.settings.http, keys=None))
        if request.method == "POST":
            if self.settings.http.cluster_secret is None and not _is_local(request):
                raise HttpError(  # whoever adds a replica is sent prompts and keys
                    403,
                    "replicas are changed from the router's own machine, or by whoever knows the secret of its "
                    "--cluster-secret FILE",
                    "no_cluster_secret",
                )
            await self._change(await read_body(request, self.settings.http))
        replicas = [one.as_json() for one in self.fleet.replicas]
        cluster = {} if self.cluster is None else {"cluster": self.cluster.as_json()}
        workers = [one.as_json() | {"for": url} for url, found in self.fleet.prefill.items() for one in found]
        prefill = {"prefill": workers} if workers else {}
        return _json({"policy": self.settings.policy, "replicas": replicas, **prefill, **cluster})

    async def _change(self, body: bytes) -> None:
        try:
            change = msgspec.json.decode(body, type=_Change)
        except ValueError as error:
            raise HttpError(400, f"the body must be an object with add, drain or remove: {error}") from None
        seconds = min(max(change.seconds, 0.0), MOST_DRAIN)
        try:
            if change.add is not None:
                self.fleet.add(change.add)
            if change.drain is not None:
                await self.fleet.drain(change.drain, seconds)
            if change.remove is not None:
                await self.fleet.remove(change.remove)
            if change.update:
                if self.cluster is None:
                    raise ConfigError("nobody here starts replicas; update them one by one, with drain and remove")
                await self.cluster.update()
        except ConfigError as error:
            raise HttpError(400, str(error), "invalid_value") from None
        except TokenmillError as error:
            raise HttpError(500, str(error)) from None


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


async def _left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
