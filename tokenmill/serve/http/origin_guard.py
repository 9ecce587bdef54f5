"""OriginGuard: keeps web pages from making a browser ask a server that only its user can reach.

A page of any site can make the browser of whoever reads it send requests to localhost or to a machine in the same
network. Two things tell such requests: the `Host` that they are for (a name that its owner has pointed at this address,
to have the page and the server count as one site), and where the browser says that they come from.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.serve.errors import HttpError, shape_at
from tokenmill.serve.http.access_log import AccessRecord
from tokenmill.serve.http.request_context import error_response
from tokenmill.serve.http.server_state import server_of
from tokenmill.serve.settings import HttpSettings

_SAFE = ("GET", "HEAD", "OPTIONS")  # change nothing, and their answers are not for other sites' pages to read


class OriginGuard:
    """Refuses what a foreign page has sent. Programs that are no browsers are not affected, except by a Host that is
    not this server's, where that is looked at: `hosts` are given, or no key is wanted and the address is this
    machine's alone."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._origins = {origin.lower() for origin in settings.origins}
        self._hosts = {_bare(name) for name in (*settings.hosts, settings.host)}
        self._any_host = "*" in settings.hosts or not (
            settings.hosts or (settings.keys is None and _is_local(settings.host))
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            request = Request(scope)
            record = AccessRecord(server_of(request), request)
            record.end(problem.status, error=problem)
            await error_response(problem, shape_at(scope["path"]), record.headers())(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> HttpError | None:
        headers = Headers(scope=scope)
        hosts = [host.lower() for host in headers.getlist("host")]
        if not self._any_host and not all(self._is_ours(_bare(host)) for host in hosts):
            return HttpError(
                403,
                "the Host of this request is not a name of this server; if it should be one, start the server with "
                "--allowed-host NAME",
                "host_not_allowed",
                close=True,
            )
        if scope["method"] not in _SAFE and self._is_foreign(
            hosts, headers.get("origin"), headers.get("sec-fetch-site")
        ):
            return HttpError(
                403,
                "a web page of another origin may not ask here; if it should, start the server with --origin ORIGIN",
                "origin_not_allowed",
                close=True,
            )
        return None

    def _is_ours(self, host: str) -> bool:
        """A number cannot be pointed elsewhere, and localhost is always this machine."""
        return host in self._hosts or host == "localhost" or host.endswith(".localhost") or _is_number(host)

    def _is_foreign(self, hosts: list[str], origin: str | None, site: str | None) -> bool:
        if "*" in self._origins or (origin is not None and origin.lower() in self._origins):
            return False
        if site is not None:  # browsers say it where nobody can listen; pages cannot set it
            return site.lower() not in ("same-origin", "none")
        return origin is not None and origin.lower().partition("://")[2] not in hosts


def _bare(host: str) -> str:
    """Without the port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    return _bare(host) == "localhost" or (_is_number(host) and ipaddress.ip_address(host).is_loopback)
