"""SSE encoder and response: answers sent as server-sent events while they are generated."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from tokenmill.request_state import RequestState
from tokenmill.serve.engine_client.streams import Stream
from tokenmill.serve.errors import GONE, HttpError
from tokenmill.serve.http.continued import Continued
from tokenmill.serve.http.event_ids import events_of
from tokenmill.serve.http.request_context import RequestContext, SelfClosingResponse, logged_http_error
from tokenmill.serve.http.routed import FrameWriter, Told, framed
from tokenmill.serve.http.routed_streams import RoutedStream

DONE = b"data: [DONE]\n\n"
# No empty line behind it: to clients that take one for the end of an event whenever they know an id, it would be one.
_COMMENT = b": still here\n"
_encode = msgspec.json.Encoder().encode


def event(content: Any, name: str | None = None) -> bytes:
    if name is None:
        return b"data: %b\n\n" % _encode(content)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(content))


class SSEEncoder(Protocol):
    """Encodes what streams bring as events, in the format of one API. It never waits."""

    streams: list[Stream]
    numbered: int = 0  # events so far, where they have numbers

    def start(self) -> bytes:
        """Before anything has come."""
        return b""

    def update(self, number: int, state: RequestState) -> bytes:
        """What is new in a stream, of which `state` is the request as far as it is to be told; may be nothing. Raises
        HttpError where it has failed."""
        ...

    def ends(self, number: int, state: RequestState) -> bool:
        """Whether this is the end of a stream, and not what a client has seen of it elsewhere."""
        return state is self.streams[number].request_state and state.finished

    def finish(self) -> bytes:
        """After the last update."""
        ...


class SSEResponse(SelfClosingResponse):
    """Sends what an encoder makes of streams. `last` follows an error; with `named`, an error is an event called error.

    As long as the client keeps up, the events of a step are written in the moment the step's tokens arrive: no task is
    woken for them. A client that does not keep up is written to by the task that runs the response, which waits for it;
    what comes meanwhile is told in one go.
    """

    def __init__(self, context: RequestContext, encoder: SSEEncoder, last: bytes = DONE, named: bool = False) -> None:
        super().__init__(
            status_code=200,
            headers=context.headers() | {"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._context = context
        self._encoder = encoder
        # For a router, which may have another server go on.
        states = [one.request_state for one in encoder.streams]
        self._frames = FrameWriter(context.route, states) if context.route else None
        self._told_of_end = 0  # events of the end that the client has
        self._last = last
        self._named = named
        self._connection: Any = None  # of GuardedProtocol, where it may be written to directly
        self._open = set(range(len(encoder.streams)))  # streams that have not ended
        self._updates: dict[int, None] = {}  # streams whose news the task has to tell, in order
        self._problem: Exception | None = None
        self._sent = 0  # how often something was sent
        self._slow = True  # the task is at work: nobody else may write
        self._woken = asyncio.Event()
        self._routed: RoutedStream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, self._routed = 200, self._context.enter_routed()
        try:
            async with self._context.cancel_on_disconnect(receive, self._left):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._connection = scope.get("tokenmill.connection")
                keep_alive = asyncio.create_task(self._keep_alive(send))
                try:
                    await self._begin(send)
                    for number, stream in enumerate(self._encoder.streams):
                        stream.set_listener(partial(self._moved, number))
                    await self._tell(send)
                    part = self._end()
                except Exception as problem:
                    error = logged_http_error(problem, self._context.id)
                    status, self._context.problem = error.status, error
                    part = event(self._context.shape(error), "error" if self._named else None) + self._last
                    part = self._framed(part, end=True, error=status)
                finally:
                    keep_alive.cancel()
                await self._send(send, part)
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._open.clear()  # whatever still comes is for nobody
            if self._routed is not None:
                if status == 200:  # written, but who knows how far it came
                    self._context.leave_routed(self._routed)
                self._context.server.routed.end(self._routed)
            self._context.close(status)

    async def _begin(self, send: Send) -> None:
        """Say what comes before the first token. What was sent elsewhere is gone through, and not sent again."""
        progress, part = self._context.progress, self._encoder.start()
        if self._context.continued is not None:
            await self._go_on(send, self._context.continued, part)
            return
        if progress is None or not progress.started:
            await self._send(send, self._start(part))
        if progress is not None:
            first = 0
            for number, stream in enumerate(self._encoder.streams):
                count = len(stream.request_state.sequences)
                if any(index in progress.sequences for index in range(first, first + count)):
                    self._look(number)
                first += count
            self._encoder.numbered = max(self._encoder.numbered, progress.numbered)

    async def _go_on(self, send: Send, continued: Continued, start: bytes) -> None:
        """Say what comes behind the last event that the client has: what it had seen is gone through first."""
        encoder, position = self._encoder, continued.position
        continued.check_complete()
        if position.at_start:
            await self._send(send, self._start(start, position.skip))
            return
        await self._send(send, self._framed(b"", start=True))
        for number, (before, _) in enumerate(continued.replays):
            if any(one.num_tokens or one.finish for one in before.sequences):
                encoder.update(number, before)
                await self._send(send, self._news(number, before, b""))
        encoder.numbered = position.numbered - position.skip
        if position.at_end:
            self._told_of_end = position.skip
        elif position.skip:
            for number, (_, after) in enumerate(continued.replays):
                if position.before != position.after and (part := encoder.update(number, after)):
                    part = b"".join(events_of(part)[position.skip :])
                    await self._send(send, self._news(number, after, part, position.skip))
        for number in range(len(encoder.streams)):
            await self._send(send, self._look(number))

    def _start(self, part: bytes, first: int = 0) -> bytes:
        if self._frames is None:
            return part
        return self._frames.start(b"".join(events_of(part)[first:]), first, self._encoder.numbered)

    def _news(self, number: int, state: RequestState, part: bytes, first: int = 0) -> bytes:
        return part if self._frames is None else self._frames.update(number, state, part, self._encoder.numbered, first)

    def _end(self) -> bytes:
        part, first = self._encoder.finish(), self._told_of_end
        if self._frames is None:
            return part
        return self._frames.end(b"".join(events_of(part)[first:]), first, self._encoder.numbered)

    def _framed(self, part: bytes, **facts: Any) -> bytes:
        if self._frames is None:
            return part
        return framed(part, Told(numbered=self._encoder.numbered, **facts))

    def _left(self) -> None:
        """Whoever asked is gone. A router that is gone without a word had a client, who will come with another one."""
        told = self._sent and self._frames is not None and self._frames.has_ids  # else nobody can come back for it
        if not told or self._routed is None or not self._context.leave_routed(self._routed):
            self._context.cancel()
            return
        self._open.clear()
        self._problem = self._problem or HttpError(GONE, "the router is gone", "router_gone")
        self._woken.set()

    def _moved(self, number: int) -> None:
        """A stream has news: tell them at once, or have the task do it."""
        if number not in self._open:
            return
        connection = self._connection
        behind = connection is None or connection.flow.write_paused or connection.transport.is_closing()
        if self._slow or self._updates or behind:
            self._updates[number] = None
            self._woken.set()
            return
        try:
            if part := self._look(number):
                self._sent += 1
                connection.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
                self._context.note_sent()
        except Exception as problem:  # the delivery goes on to others
            self._problem = problem
        if self._problem is not None or not self._open:
            self._woken.set()

    def _look(self, number: int) -> bytes:
        stream = self._encoder.streams[number]
        stream.mark_read()
        if stream.request_state.finished:
            self._open.discard(number)
        return self._news(number, stream.request_state, self._encoder.update(number, stream.request_state))

    async def _tell(self, send: Send) -> None:
        """Returns when every stream has ended; raises what one of them failed of."""
        while True:
            while self._updates and self._problem is None:
                number = next(iter(self._updates))
                del self._updates[number]
                await self._send(send, self._look(number))
            if self._problem is not None:
                raise self._problem
            if not self._open:
                return
            self._woken.clear()
            self._slow = False
            await self._woken.wait()
            self._slow = True

    async def _send(self, send: Send, part: bytes) -> None:
        if part:
            self._sent += 1
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._context.note_sent()

    async def _keep_alive(self, send: Send) -> None:
        """Proxies close what is silent for long."""
        while True:
            before = self._sent
            await asyncio.sleep(self._context.server.settings.beat_seconds)
            if self._sent == before:
                await send({"type": "http.response.body", "body": self._framed(_COMMENT), "more_body": True})
