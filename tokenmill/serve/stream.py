"""Stream: the answer to one request, as whoever asked for it reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokenmill.front import Follow
from tokenmill.outputs import RequestOutput


class Stream:
    """The answer to one request, as an async iterator of RequestOutput. Each output is the whole answer so far; a slow
    reader sees fewer of them. Leaving it (`aclose`, `async with`, or dropping it) cancels the request; a wait for the
    next output that is itself cancelled (a timeout, say) does not, and the stream can be read on."""

    def __init__(self, ticket: Ticket, drop: Callable[[Ticket], None]) -> None:
        self.request_id = ticket.follow.id
        self.prompt_token_ids = ticket.follow.prompt_ids
        self._ticket = ticket
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._over = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The newest output. A request that failed ends with finish_reason "error" and says why in `.error`."""
        ticket = self._ticket
        while not self._over:
            if ticket.moved:
                ticket.moved = False
                output = ticket.follow.output()
                self._over = output.finished
                return output
            ticket.arrived.clear()
            await ticket.arrived.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request unless it is finished."""
        self._over = True
        self._drop(self._ticket)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over and not self._loop.is_closed():  # any thread may collect garbage
            self._loop.call_soon_threadsafe(self._drop, self._ticket)


class Ticket:
    """A request on its way, as its stream and the service share it."""

    __slots__ = ("arrived", "follow", "generation", "moved", "timer")

    def __init__(self, follow: Follow, generation: int) -> None:
        self.follow = follow
        self.generation = generation  # of the engine that was up when it came
        self.moved = False
        self.arrived = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self.moved = True
        self.arrived.set()
