"""Embeddings: the front's side of asking for vectors, which are asked for again when an engine dies."""

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
class _Asked:
    message: wire.Embed
    answer: asyncio.Future[list[float]]
    deaths: int = 0


class Embeddings:
    """What was asked for and not answered yet."""

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}
        self._count = 0
        self._send: Callable[[wire.ToEngine], None] | None = None
        self.on_left: Callable[[], None] = lambda: None  # called when somebody no longer waits

    @property
    def pending(self) -> int:
        return len(self._asked)

    @property
    def queued_tokens(self) -> int:
        return sum(len(asked.message.tokens) for asked in self._asked.values())

    def ask(self, tokens: list[int], pooling: str) -> asyncio.Future[list[float]]:
        self._count += 1
        asked = _Asked(wire.Embed(self._count, tokens, pooling), asyncio.get_running_loop().create_future())
        self._asked[self._count] = asked
        asked.answer.add_done_callback(partial(self._answered, self._count))
        if self._send is not None:
            self._send(asked.message)
        return asked.answer

    def _answered(self, key: int, answer: asyncio.Future[list[float]]) -> None:
        if answer.cancelled() and self._asked.pop(key, None) is not None:
            if self._send is not None:
                self._send(wire.Unembed(key))
            self.on_left()

    def take_in(self, message: wire.Embedded) -> None:
        asked = self._asked.pop(message.key, None)
        if asked is None or asked.answer.done():
            return
        if message.error is None:
            asked.answer.set_result(message.vector)
        else:
            kind, _, text = message.error.partition(": ")
            asked.answer.set_exception(InvalidRequest(text) if kind == "InvalidRequest" else TokenmillError(text))

    def attach(self, send: Callable[[wire.ToEngine], None]) -> None:
        self._send = send
        for asked in self._asked.values():
            send(asked.message)

    def lose(self, cause: str) -> None:
        """The engine is gone. It worked on the oldest, if on any: the others had nothing to do with its end."""
        was_ready, self._send = self._send is not None, None
        if self._asked and was_ready:
            key, oldest = next(iter(self._asked.items()))
            oldest.deaths += 1
            if oldest.deaths > MOST_DEATHS:
                self.take_in(wire.Embedded(key, [], f"Loss: the engine died {oldest.deaths} times with it: {cause}"))
                self.on_left()

    def end_all(self, why: str) -> int:
        """There is no engine for them any more; returns how many were still waited for."""
        ending, self._asked = self._asked, {}
        for asked in ending.values():
            if not asked.answer.done():
                asked.answer.set_exception(Unavailable(why, RETRY))
        self.on_left()
        return len(ending)
