"""GuardedProtocol: a connection that cannot be held open by sending little, reading little, or nothing at all."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

from tokenmill.serve.http_settings import HttpSettings

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


def protocol_for(settings: HttpSettings) -> type[asyncio.Protocol]:
    return type("Protocol", (GuardedProtocol,), {"settings": settings})


class GuardedProtocol(Base):
    settings: HttpSettings
    _late: asyncio.TimerHandle | None = None  # closes a connection whose request does not come
    _stuck: asyncio.TimerHandle | None = None  # ... whose answer is not taken
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        super().data_received(data)
        if self._busy:
            _off(self._late)
            self._late = None
        elif self._late is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _off(self._late)
        self._late = None
        _off(self._stuck)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        _off(self._stuck)
        self._stuck = self.loop.call_later(self.settings.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _off(self._stuck)
        super().resume_writing()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(self.settings.head_seconds, self._too_late)

    def _too_late(self) -> None:
        self._late = None
        if not self._busy:
            self.transport.close()


def _off(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _tell_time(state: object) -> None:
    """Set the Date header, at most once a second."""
    now = int(time.time())
    if getattr(state, "second", None) != now:
        state.second = now  # type: ignore[attr-defined]
        state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]  # type: ignore[attr-defined]
