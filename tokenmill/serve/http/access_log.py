"""AccessRecord: what operators get to see of one request: its line in the access log, its counts, its trace."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import Request

from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.observe.logs import LONGEST_PATH

log = logging.getLogger("tokenmill.serve.access")

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class AccessRecord:
    """Begun with a request's head, ended once with its answer."""

    def __init__(self, server: ServerState, request: Request, id: str | None = None) -> None:
        self.id = id or uuid.uuid4().hex
        self.trace = None if server.tracing is None else server.tracing.begin(request, self.id, route_of(request))
        self._server = server
        self._request = request
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.id}
        if self.trace is not None:
            headers["traceresponse"] = self.trace.header
        return headers

    def end(self, status: int, told: dict[str, Any] | None = None, error: HttpError | None = None) -> None:
        """Count the request and write it into the log. What `told` has as None is not mentioned."""
        scope, code = self._request.scope, None if error is None else error.code
        if "tokenmill.owner" not in scope:  # what a batch asks is not over HTTP, and is asked until there is room
            self._server.metrics.http_ended(route_of(self._request), status, code)
        if self.trace is not None:
            self.trace.end(status, told or {}, error)
        client = scope.get("client")
        said = {
            "id": self.id,
            "trace_id": self._trace_id(),
            "status": status,
            "code": code,
            "seconds": round(self.seconds, 4),
            "key": scope.get("tokenmill.key"),
            "client": client[0] if client else None,
            "batch": scope.get("tokenmill.batch"),
            **(told or {}),
        }
        level = logging.WARNING if status >= 500 else logging.INFO
        path = scope["path"][:LONGEST_PATH]
        log.log(
            level, "%s %s", scope["method"], path, extra={name: one for name, one in said.items() if one is not None}
        )

    def _trace_id(self) -> str | None:
        """Ours, or the client's own where this server does not trace."""
        if self.trace is not None:
            return self.trace.id
        found = _TRACEPARENT.match(self._request.headers.get("traceparent", ""))
        return found[1] if found else None


def route_of(request: Request) -> str:
    """The route's pattern, whatever name is in its place."""
    route = request.scope.get("route")
    return str(getattr(route, "path", request.scope["path"]))
