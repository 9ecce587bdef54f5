"""EmbeddingClient: the front's side of asking for vectors, which are asked for again when an engine dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.admission import Unavailable

MOST_DEATHS = 2  # engines that may die with a text before it is given up
RETRY = 5.0  # seconds that a client is told to wait where there is no engine


@dataclass
class _PendingEmbedding:
    message: wire.Embed
    answer: asyncio.Future[list[float]]
    deaths: int = 0


class EmbeddingClient:
    """What was asked for and not answered yet."""

    def __init__(self) -> None:
        self._pending: dict[int, _PendingEmbedding] = {}
        self._count = 0
        self._send: Callable[[wire.ToEngine], None] | None = None
        self.on_left: Callable[[], None] = lambda: None  # called when somebody no longer waits

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def queued_tokens(self) -> int:
        return sum(len(entry.message.tokens) for entry in self._pending.values())

    def ask(self, tokens: list[int], pooling: str) -> asyncio.Future[list[float]]:
        self._count += 1
        entry = _PendingEmbedding(wire.Embed(self._count, tokens, pooling), asyncio.get_running_loop().create_future())
        self._pending[self._count] = entry
        entry.answer.add_done_callback(partial(self._answered, self._count))
        if self._send is not None:
            self._send(entry.message)
        return entry.answer

    def _answered(self, key: int, answer: asyncio.Future[list[float]]) -> None:
        if answer.cancelled() and self._pending.pop(key, None) is not None:
            if self._send is not None:
                self._send(wire.CancelEmbed(key))
            self.on_left()

    def take_in(self, message: wire.Embedded) -> None:
        entry = self._pending.pop(message.key, None)
        if entry is None or entry.answer.done():
            return
        if message.error is None:
            entry.answer.set_result(message.vector)
        else:
            kind, _, text = message.error.partition(": ")
            entry.answer.set_exception(InvalidRequest(text) if kind == "InvalidRequest" else TokenmillError(text))

    def attach(self, send: Callable[[wire.ToEngine], None]) -> None:
        self._send = send
        for entry in self._pending.values():
            send(entry.message)

    def lose(self, cause: str) -> None:
        """The engine is gone. It worked on the oldest, if on any: the others had nothing to do with its end."""
        was_ready, self._send = self._send is not None, None
        if self._pending and was_ready:
            key, oldest = next(iter(self._pending.items()))
            oldest.deaths += 1
            if oldest.deaths > MOST_DEATHS:
                self.take_in(wire.Embedded(key, [], f"Loss: the engine died {oldest.deaths} times with it: {cause}"))
                self.on_left()

    def end_all(self, why: str) -> int:
        """There is no engine for them any more; returns how many were still waited for."""
        ending, self._pending = self._pending, {}
        for entry in ending.values():
            if not entry.answer.done():
                entry.answer.set_exception(Unavailable(why, RETRY))
        self.on_left()
        return len(ending)
