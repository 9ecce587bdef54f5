"""RemoteAdapters: the LoRA adapters that the engine process is to have, told to every new one before its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import InvalidRequest
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.admission import Unavailable

log = logging.getLogger("tokenmill.serve")

MOST_ADAPTERS = 10_000  # names at once


@dataclass(frozen=True)
class KnownAdapter:
    path: Path
    key: str  # what its files are known by, also in the prefix cache
    created: float  # when it was loaded, seconds since 1970


class RemoteAdapters:
    def __init__(self) -> None:
        self.known: dict[str, KnownAdapter] = {}
        self._send: Callable[[wire.ToEngine], None] | None = None
        self._asked: dict[int, tuple[str, Path, asyncio.Future[None]]] = {}  # by number
        self._number = 0

    async def load(self, name: str, path: Path) -> None:
        """Raises InvalidRequest with the engine's sentence, and Unavailable."""
        if self._send is None:
            raise Unavailable("the engine is being started; try again later", 5.0)
        if name not in self.known and len(self.known) + len(self._asked) >= MOST_ADAPTERS:
            raise InvalidRequest(f"there are {MOST_ADAPTERS:,} adapters, which is the most; unload one first")
        self._number += 1
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[self._number] = name, path, answer
        self._send(wire.LoadAdapter(self._number, name, str(path)))
        await answer

    def unload(self, name: str) -> None:
        if self.known.pop(name, None) is None:
            raise InvalidRequest(f"there is no adapter {name!r:.100}")
        if self._send is not None:
            self._send(wire.UnloadAdapter(name))

    def key_of(self, name: str) -> str | None:
        """Of the weights that a request sent now runs with. None: there are none; "": they are being replaced."""
        if any(asked == name for asked, _, _ in self._asked.values()):
            return ""
        known = self.known.get(name)
        return None if known is None else known.key

    # -- what the supervisor tells ----------------------------------------------------------------------------

    def attach(self, send: Callable[[wire.ToEngine], None]) -> None:
        """A new engine is ready: it reads them before it hears of any request."""
        self._send = send
        for name, one in self.known.items():
            send(wire.LoadAdapter(0, name, str(one.path), one.key))

    def lost(self) -> None:
        self._send = None
        asked, self._asked = self._asked, {}
        for _, _, answer in asked.values():
            if not answer.done():
                answer.set_exception(Unavailable("the engine ended while it read the adapter; try again later", 5.0))

    def loaded(self, message: wire.AdapterLoaded) -> None:
        if message.number == 0:
            if message.error is not None:
                log.error("the adapter %s is gone with the last engine: %s", message.name, message.error)
                self.known.pop(message.name, None)
            return
        asked = self._asked.pop(message.number, None)
        if asked is None:
            return
        name, path, answer = asked
        if message.key is not None:
            self.known[name] = KnownAdapter(path, message.key, time.time())
        if answer.done():  # whoever asked has left
            return
        if message.error is not None:
            answer.set_exception(InvalidRequest(message.error))
        else:
            answer.set_result(None)
