"""POST /reset_prefix_cache: a tenant has what was kept of its texts forgotten."""

from __future__ import annotations

from starlette.responses import Response

from tokenmill.serve.api.schemas import ResetPrefixCacheRequest
from tokenmill.serve.http.request_context import RequestContext


async def reset(context: RequestContext, body: ResetPrefixCacheRequest) -> Response:
    """Its own salts only: whoever wipes them all makes everybody else's next answer slow."""
    context.server.service.reset_prefix_cache(context.tenant.salt(body.cache_salt))
    return context.answer({"status": "ok"})
