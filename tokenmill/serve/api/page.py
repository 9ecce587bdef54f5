"""The page at /: its files, sent with headers that let nothing in a browser come from anywhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenmill.serve.api.live import Live, watch
from tokenmill.serve.http.request_context import reader
from tokenmill.serve.http.server_state import server_of

FOLDER = Path(__file__).parents[1] / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# What a model writes is never HTML here: no script but the page's own runs, and trusted-types makes every attempt to
# parse text as HTML an error.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for again with its ETag
}

Answer = Callable[[Request], Awaitable[Response]]


def add_pages(app: FastAPI) -> None:
    """Add the page and what it watches. Every file has a route of its own: there is no path to play tricks with."""
    app.state.live = Live(app.state.server)
    _add(app, "/live", reader(watch), ["GET"])
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in KINDS:
            answer = _file(file)
            if file.name == "index.html":
                _add(app, "/", _page_or_text(answer))
            else:
                _add(app, f"/page/{file.name}", answer)


def _add(app: FastAPI, path: str, answer: Answer, methods: list[str] | None = None) -> None:
    app.add_api_route(path, answer, methods=methods or ["GET", "HEAD"], include_in_schema=False, response_model=None)


def _file(file: Path) -> Answer:
    content = file.read_bytes()
    kind = f"{KINDS[file.suffix]}; charset=utf-8"
    headers = HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"', "content-type": kind}

    async def answer(request: Request) -> Response:
        known = {one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")}
        if headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer


def _page_or_text(page: Answer) -> Answer:
    """The page for a browser, a few lines for a terminal."""

    async def front(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            response = await page(request)
        else:
            response = PlainTextResponse(_plain_text(request))
        response.headers["vary"] = "accept"
        return response

    return front


def _plain_text(request: Request) -> str:
    server = server_of(request)
    stage = server.service.startup.now
    return (
        f"tokenmill serves {server.name_of(server.service)}{'' if stage is None else f' soon ({stage})'}\n\n"
        "Open this address in a browser to chat and to watch the engine.\n"
        "OpenAI's API is under /v1, Anthropic's at /v1/messages; /openapi.json describes all of it.\n"
        "/health/ready and /metrics tell how it fares.\n"
    )
