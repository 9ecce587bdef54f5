"""/v1/sessions: programs of clients. A session does what it is asked to until it is closed or its lease ends."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.schemas import LEAST_LEASE, MOST_LEASE, SessionCallRequest, SessionRequest
from tokenmill.serve.api.session_call import SessionCall, usage_of
from tokenmill.serve.api.session_steps import steps_of
from tokenmill.serve.engine_client.sessions import MAIN, Session
from tokenmill.serve.errors import GONE, HttpError
from tokenmill.serve.http.request_context import (
    RequestContext,
    SelfClosingResponse,
    json_response,
    logged_http_error,
)
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.http.sse import DONE, event
from tokenmill.serve.http.tenants import Tenant

LEASE = 60.0  # seconds, where a client names none


async def open_session(context: RequestContext, body: SessionRequest) -> Response:
    options = context.scheduling(body)
    lease = _lease(body.lease_seconds) or LEASE
    sessions = context.server.sessions
    context.service.check_open()
    return context.answer(_told(sessions.open(context.tenant.name, context.service, options, lease)))


async def call(context: RequestContext, body: SessionCallRequest) -> Response:
    sessions = context.server.sessions
    session = sessions.found(context.tenant.name, context.request.path_params["name"])
    state, lease = session.state(MAIN if body.state is None else body.state), _lease(body.lease_seconds)
    work = SessionCall(sessions, session, state, steps_of(body.do))
    sessions.renew(session, lease)
    if body.stream:
        return _SessionStream(context, work)
    task = asyncio.ensure_future(work.run())
    context.on_cancel = task.cancel
    try:
        async with context.cancel_on_disconnect(context.request.receive):
            return context.answer(await task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise HttpError(GONE, "the client left") from None
        raise
    finally:
        _account(context, work)


async def one_session(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """A session: its states, what is left of its lease, and what it has cost."""
    return json_response(_told(server.sessions.found(tenant.name, request.path_params["name"])))


async def close_session(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """End a session, and whatever runs in it. What it held is free at once."""
    session = server.sessions.found(tenant.name, request.path_params["name"])
    server.sessions.close(session, "closed", "it was closed")
    return json_response({"id": session.id, "object": "session", "deleted": True, "usage": usage_of(session.usage)})


class _SessionStream(SelfClosingResponse):
    """Results as they come, as server-sent events; the last one before [DONE] is what is told without `stream`."""

    def __init__(self, context: RequestContext, work: SessionCall) -> None:
        super().__init__(
            status_code=200,
            headers=context.headers() | {"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._context, self._work = context, work
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, status = self._context, 200
        task = asyncio.ensure_future(self._work.run(self._events.put_nowait))
        task.add_done_callback(lambda _: self._events.put_nowait(None))
        context.on_cancel = task.cancel
        try:
            async with context.cancel_on_disconnect(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while (part := await self._next()) is not None:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                if task.cancelled():
                    status = GONE
                    return
                try:
                    part = event(task.result())
                except Exception as problem:
                    error = logged_http_error(problem, context.id)
                    status, context.problem = error.status, error
                    part = event(context.shape(error))
                await send({"type": "http.response.body", "body": part + DONE})
        finally:
            _account(context, self._work)
            context.close(status)

    async def _next(self) -> bytes | None:
        """What there is to say by now, or a comment after a silence; None: it is over."""
        try:
            async with asyncio.timeout(self._context.server.settings.beat_seconds):
                found = await self._events.get()
        except TimeoutError:
            return b": still here\n\n"
        return None if found is None else event(found)


def _account(context: RequestContext, work: SessionCall) -> None:
    """What was computed counts, and not what was there already."""
    context.prompt_tokens, context.output_tokens = work.usage.computed_tokens, work.usage.output_tokens
    context.finish = "stop"


def _told(session: Session) -> dict[str, Any]:
    left = session.expires - asyncio.get_running_loop().time()
    return {
        "id": session.id,
        "object": "session",
        "lease_seconds": session.lease,
        "expires_in": round(max(0.0, left), 3),
        "states": {
            name: {"tokens": len(state.sequence.tokens), "busy": state.busy} for name, state in session.states.items()
        },
        "usage": usage_of(session.usage),
    }


def _lease(seconds: float | None) -> float | None:
    if seconds is not None and not LEAST_LEASE <= seconds <= MOST_LEASE:
        raise InvalidRequest(f"lease_seconds is {seconds}; it must be from {LEAST_LEASE} to {MOST_LEASE}")
    return seconds
