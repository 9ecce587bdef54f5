"""What a server shows to people with a browser."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from tokenmill.serve.site import site_of


async def front_page(request: Request) -> PlainTextResponse:
    """What is here."""
    site = site_of(request)
    return PlainTextResponse(
        f"tokenmill serves {site.name_of(site.service)}\n\n"
        "OpenAI's API is under /v1, Anthropic's at /v1/messages; /openapi.json describes all of it.\n"
        "/health/ready and /metrics tell how it fares.\n"
    )


def add_pages(app: FastAPI) -> None:
    app.add_api_route("/", front_page, methods=["GET"], include_in_schema=False, response_model=None)
