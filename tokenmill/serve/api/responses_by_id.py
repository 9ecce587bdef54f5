"""/v1/responses/ID: stored responses are read, cancelled and deleted by whoever made them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.response_items import history, items_of
from tokenmill.serve.errors import unsupported
from tokenmill.serve.http.paging import listing, ordered, page
from tokenmill.serve.http.request_context import json_response
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.http.tenants import Tenant
from tokenmill.serve.storage.stored_responses import StoredResponse

_PATIENCE = 5.0  # seconds for a response that is cancelled to end


async def one_response(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """A stored response."""
    stored = server.responses.found(tenant.name, request.path_params["name"])
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise unsupported("stream is set, but a stored response is told as a whole; leave it out")
    return _response(stored)


async def input_items(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """What a stored response answered: the conversation before it and its own input."""
    stored = server.responses.found(tenant.name, request.path_params["name"])
    before = server.responses.chain(tenant.name, stored.previous)
    said = await asyncio.to_thread(lambda: [*history(before), *items_of(stored.given)])  # may be megabytes
    items = ordered(request, said, "desc")
    shown, more = page(request, items, lambda item: str(item["id"]))
    return json_response({"object": "list", **listing(shown, more)})


async def cancel_response(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """End a response that is made in the background."""
    stored = server.responses.found(tenant.name, request.path_params["name"])
    if not stored.in_background:
        raise InvalidRequest(
            f"{stored.id!r} was not asked for with background, and only such a response can be cancelled"
        )
    if stored.cancel is not None and stored.task is not None:
        stored.cancel()
        await asyncio.wait([stored.task], timeout=_PATIENCE)
    return _response(stored)


async def delete_response(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Forget a response. Those that go on from it stay, but nothing can go on from them."""
    stored = server.responses.found(tenant.name, request.path_params["name"])
    server.responses.remove(tenant.name, stored.id)
    if stored.running and stored.cancel is not None:
        stored.cancel()
    return json_response({"id": stored.id, "object": "response", "deleted": True})


def _response(stored: StoredResponse) -> Response:
    return Response(stored.response, media_type="application/json")
