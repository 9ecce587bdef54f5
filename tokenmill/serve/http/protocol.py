"""GuardedProtocol: a connection that cannot be held open by sending little, reading little, or nothing at all."""

from __future__ import annotations

import asyncio
import select
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from tokenmill.serve.settings import HttpSettings

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Base
else:
    try:  # several times faster
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "too many connections are open; try again later", "type": "server_error", '
    b'"param": null, "code": "too_many_connections"}}'
)

_LONG_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "the head of the request is too long; send shorter headers", '
    b'"type": "invalid_request_error", "param": null, "code": "head_too_long"}}'
)
MOST_HEAD = 64 << 10  # bytes
_LOOK = 0.25  # seconds
_COUNTED = hasattr(Base, "on_headers_complete")  # the other parser has a limit of its own

_ALWAYS = [(b"x-content-type-options", b"nosniff")]  # what an answer quotes of a request is not for a browser to run


def protocol_for(settings: HttpSettings) -> type[asyncio.Protocol]:
    return type("Protocol", (GuardedProtocol,), {"settings": settings})


class GuardedProtocol(Base):
    settings: HttpSettings
    _late: asyncio.TimerHandle | None = None  # closes a connection whose request does not come
    _stuck: asyncio.TimerHandle | None = None  # ... whose answer is not taken
    _looking: asyncio.TimerHandle | None = None  # looks whether the client is still there
    _refused = False
    _unread = 0  # bytes that have come since the parser last had something for us
    _earlier: list[Any]  # requests that were not answered yet when the next one came over the same connection

    def on_message_begin(self) -> None:  # of the fast parser
        super().on_message_begin()  # type: ignore[misc]
        self.scope["tokenmill.connection"] = self  # type: ignore[typeddict-unknown-key]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._earlier = []
        if len(self.connections) > self.settings.max_connections:
            self._refused = True
            transport.write(_FULL)
            transport.close()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        _tell_time(self.server_state)
        self._unread += len(data)
        super().data_received(data)
        if _COUNTED and self._unread > MOST_HEAD:
            self._refuse_head()
            return
        if self._busy:
            _off(self._late)
            self._late = None
        elif self._late is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _off(self._late)
        self._late = None
        _off(self._stuck)
        _off(self._looking)
        super().connection_lost(exc)  # which tells the newest request
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        _off(self._stuck)
        self._stuck = self.loop.call_later(self.settings.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _off(self._stuck)
        super().resume_writing()

    # What the parser finds. A head, or what stands between the chunks of a body, may not go on without end.

    def on_headers_complete(self) -> None:
        self._unread, before = 0, self.cycle
        super().on_headers_complete()  # type: ignore[misc]
        if before is not None and not before.response_complete:
            self._earlier.append(before)
            if self._looking is None:
                self._look_for_end()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()  # type: ignore[misc]

    def _look_for_end(self) -> None:
        """With a request in waiting nothing is read from a connection, and so its end would not be noticed."""
        self._earlier = [one for one in self._earlier if not one.response_complete]
        self._looking = self.loop.call_later(_LOOK, self._look_for_end) if self._earlier else None
        if self._earlier and _is_gone(self.transport.get_extra_info("socket")):
            self.transport.abort()

    def _refuse_head(self) -> None:
        self._refused = True
        if not self._busy:
            self.transport.write(_LONG_HEAD)
        self.transport.close()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self.settings.head_seconds, self._too_late)

    def _too_late(self) -> None:
        self._late = None
        if not self._busy:
            self.transport.close()


def _is_gone(socket: Any) -> bool:
    poll = select.poll()
    poll.register(socket.fileno(), getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))


def _off(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _tell_time(state: object) -> None:
    """Set the headers of every answer, at most once a second: one of them is the date."""
    now = int(time.time())
    if getattr(state, "second", None) != now:
        state.second = now  # type: ignore[attr-defined]
        date = formatdate(now, usegmt=True).encode()
        state.default_headers = [(b"date", date), *_ALWAYS]  # type: ignore[attr-defined]
