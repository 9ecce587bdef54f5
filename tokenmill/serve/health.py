"""GET /health/live, /health/ready and /metrics: for those who watch a server from outside."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serve.call import json_response
from tokenmill.serve.metrics import CONTENT_TYPE
from tokenmill.serve.site import site_of


async def live(request: Request) -> Response:
    """Whether this process does its work; if not, it should be started anew."""
    alive = site_of(request).service.live()
    return json_response({"live": alive}, 200 if alive else 503)


async def ready(request: Request) -> Response:
    """Whether a request would be worked on now."""
    service = site_of(request).service
    able = service.route().ready()
    stats = service.stats()
    told = {
        "ready": able,
        "state": stats.state,
        "breaker": stats.breaker,
        "active": stats.active,
        "queued": stats.queued,
        "restarts": stats.restarts,
    }
    return json_response(told, 200 if able else 503)


async def metrics(request: Request) -> Response:
    """What the server counts, for Prometheus."""
    return Response(site_of(request).metrics.text(), media_type=CONTENT_TYPE)
