"""GET /health/live, /health/ready and /metrics: for those who watch a server from outside."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serve.errors import HttpError, openai_shape
from tokenmill.serve.http.request_context import error_response, json_response
from tokenmill.serve.http.server_state import server_of
from tokenmill.serve.observe.metrics import CONTENT_TYPE


async def live(request: Request) -> Response:
    """Whether this process does its work; if not, it should be started anew."""
    alive = server_of(request).service.live()
    return json_response({"live": alive}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """Whether a request would be worked on now; if not, what is being done about it and how far that is."""
    service = server_of(request).service
    able = service.route().ready()
    stats = service.stats()
    as_json = {
        "status": "ok" if able else "unavailable" if stats.state == "ready" else stats.state,
        "ready": able,
        "state": stats.state,
        "breaker": stats.breaker,
        "active": stats.active,
        "queued": stats.queued,
        "restarts": stats.restarts,
        **service.startup.as_json(),
    }
    return json_response(as_json, 200 if able else 503)


async def metrics(request: Request) -> Response:
    """What the server counts, for Prometheus. Who its tenants are is told to an operator's key only, where there are
    keys."""
    server = server_of(request)
    sees_tenants = server.settings.keys is None
    if not sees_tenants and ("authorization" in request.headers or "x-api-key" in request.headers):
        try:
            sees_tenants = server.tenant_of(request).limits.operator
        except HttpError as error:  # a wrong key is a mistake, and not the same as none
            return error_response(error, openai_shape, {})
    return Response(server.metrics.text(sees_tenants), media_type=CONTENT_TYPE)
