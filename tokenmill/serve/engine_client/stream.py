"""Stream: the answer to one request, as whoever asked for it reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tokenmill.follow import Follow
from tokenmill.outputs import RequestOutput


class Stream:
    """The answer to one request, for one reader, in one of three ways: as an async iterator of outputs, each the whole
    answer so far (a slow reader sees fewer of them); `last`, the complete answer; or `listen` and a `look` at `follow`,
    which builds nothing and wakes nobody. Leaving it (`aclose`, `async with`, or dropping it) cancels the request; a
    wait for what comes next that is itself cancelled (a timeout, say) does not, and the stream can be read on."""

    def __init__(self, state: StreamState, drop: Callable[[StreamState], None]) -> None:
        self.request_id = state.follow.id
        self.prompt_token_ids = state.follow.prompt_ids
        self.follow = state.follow
        self.made: float | None = None  # when the engine made the oldest token that the last news brought
        self._state = state
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._over = False

    @property
    def at_fault(self) -> bool:
        """Whether the request itself caused the error that it ended with."""
        return self._state.at_fault

    async def _news(self) -> bool:
        """Wait until `follow` has moved. False: the reader knows its end already."""
        state = self._state
        while not self._over and not state.moved:
            state.waiter = self._loop.create_future()
            await state.waiter
        if self._over:
            return False
        self.look()
        return True

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `follow` has moved, in the middle of the delivery; it must `look`."""
        self._state.listener = listener
        if self._state.moved:
            listener()

    def look(self) -> None:
        """The reader looks at `follow` now: what is there is no news any more."""
        state = self._state
        state.moved = False
        self.made, state.made = state.made, None
        self._over = self.follow.finished

    async def last(self) -> RequestOutput:
        """The complete answer; nobody is woken before it is there."""
        self._state.patient = True
        while await self._news() and not self._over:
            pass
        return self.follow.output()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The newest output. A request that failed ends with finish_reason "error" and says why in `.error`."""
        if not await self._news():
            raise StopAsyncIteration
        return self.follow.output()

    async def aclose(self) -> None:
        """Cancel the request unless it is finished."""
        self._over = True
        self._drop(self._state)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over and not self._loop.is_closed():  # any thread may collect garbage
            self._loop.call_soon_threadsafe(self._drop, self._state)


class StreamState:
    """A request on its way, as its stream and the service share it."""

    __slots__ = ("at_fault", "follow", "generation", "listener", "made", "moved", "patient", "timer", "waiter")

    def __init__(self, follow: Follow, generation: int) -> None:
        self.follow = follow
        self.generation = generation  # of the engine that was up when it came
        self.at_fault = False  # its error is of its own making
        self.moved = False
        self.made: float | None = None  # when the engine made the oldest token that nobody has read
        self.patient = False  # its reader wants nothing but the end
        self.waiter: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def wake(self, made: float | None = None) -> None:
        """It has moved; `made` is when the engine made what is new."""
        if self.patient and not self.follow.finished:
            return
        self.moved = True
        if self.made is None:
            self.made = made
        if self.listener is not None:
            self.listener()
            return
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
