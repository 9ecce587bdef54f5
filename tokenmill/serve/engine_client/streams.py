"""Stream: a request that somebody waits for and its outputs; Dispatcher hands each what the engine sent for it.

A stream is two objects: `Stream` is the reader's, and a reader that drops it cancels the request; `StreamState` is what
the dispatcher holds as long as the request is not finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenmill.engine.request import Finish, Request
from tokenmill.outputs import RequestOutput
from tokenmill.processor import Processor
from tokenmill.request_state import RequestState
from tokenmill.serve.engine_client.remote_engine import RemoteEngine

log = logging.getLogger("tokenmill.serve")

SURE = 0.8  # of the time that a prompt is expected to take: estimates are off by a tenth, and nobody is ended for that
EXPIRY_GRACE = 0.25  # seconds after a deadline before the front ends what the engine should have ended
DEADLINE_TICK = 0.25  # seconds between two looks at deadlines, while there are any


class Dispatcher:
    """One `StreamState` per request that is not finished. Whatever ends a request, it is closed exactly once."""

    processor: Processor  # there once an engine has told its facts

    def __init__(
        self,
        remote: RemoteEngine,
        on_end: Callable[[StreamState], None],
        least_seconds: Callable[[Request], float | None],  # to a first token, of an engine that did nothing else
    ) -> None:
        self.active: dict[str, StreamState] = {}
        self._remote = remote
        self._on_end = on_end
        self._least_seconds = least_seconds
        self._looking = False  # at deadlines

    def open(self, request_state: RequestState, generation: int) -> Stream:
        """Hand a prepared request to the engine. Raises what `Processor.submit` raises."""
        if request_state.finished:  # it was resumed behind its last token: there is nothing to do but to say so
            over = StreamState(request_state, generation)
            over.moved = True
            return Stream(over, self.drop)
        self.processor.submit(request_state)
        for sequence in request_state.sequences:
            if sequence.finish is not None:  # resumed, and only its siblings go on
                self._remote.cancel(sequence.request.id)
        state = self.active[request_state.id] = StreamState(request_state, generation)
        if request_state.timeout is not None and not self._looking:
            self._look_later()
        return Stream(state, self.drop)

    def deliver(self, made: float | None = None) -> None:
        """Give what arrived to those who wait for it; `made` is when the engine made it."""
        for delta in self._remote.step():
            id = delta.request.id
            state = self.active.get(id) or self.active.get(id.partition("/")[0])
            try:
                moved = self.processor.take_in([delta])
            except Exception as error:  # one answer that cannot be decoded is no other's trouble
                log.exception("request %s cannot be followed", id)
                if state is not None:
                    state.request_state.leader.error = f"{type(error).__name__}: {error}"
                    self.drop(state, Finish.ERROR)
                continue
            if id in self._remote.at_fault:
                self._remote.at_fault.discard(id)
                if state is not None:
                    state.at_fault = True
            if moved and state is not None:
                state.notify(made)
                if state.request_state.finished:
                    self._close(state)

    def drop(self, state: StreamState, why: Finish = Finish.CANCELLED) -> None:
        if self.active.get(state.request_state.id) is not state:
            return
        for sequence in state.request_state.sequences:
            sequence.finish = sequence.finish or why
        self.processor.cancel(state.request_state)
        self._close(state)  # before its reader hears of it, who may fail
        state.notify()

    def _close(self, state: StreamState) -> None:
        if self.active.pop(state.request_state.id, None) is not None:
            self._on_end(state)

    def _end_late(self) -> None:
        """Deadlines are the engine's scheduler's to keep. Here is what it cannot do: end requests while it is away or
        hangs, and those who could not have a first token in time even of an engine that did nothing else."""
        now = self._remote.clock()
        timed = [state for state in self.active.values() if state.request_state.timeout is not None]
        self._looking = False
        if timed:  # first of all: whatever an end may bring about, the others are looked at again
            self._look_later()
        for state in timed:
            leader = state.request_state.leader
            assert leader.deadline is not None
            least = self._least_seconds(leader)
            if least is not None and now + SURE * least > leader.deadline:
                why = f"its first token would take {least:.3g} s or more, past its deadline"
            elif now > leader.deadline + EXPIRY_GRACE:
                why = f"its deadline passed {now - leader.arrival:.3f} s after it arrived"
            else:
                continue
            leader.error = leader.error or why
            self.drop(state, Finish.DEADLINE)

    def _look_later(self) -> None:
        self._looking = True
        asyncio.get_running_loop().call_later(DEADLINE_TICK, self._end_late)


class Stream:
    """The answer to one request, for one reader, in one of three ways: as an async iterator of outputs, each the whole
    answer so far (a slow reader sees fewer of them); `last`, the complete answer; or `set_listener` and a look at
    `request_state`, which builds nothing and wakes nobody. Leaving it (`aclose`, or dropping it) cancels the
    request; a wait for what comes next that is itself cancelled (a timeout, say) does not: it can be read on."""

    def __init__(self, state: StreamState, drop: Callable[[StreamState], None]) -> None:
        self.request_id = state.request_state.id
        self.prompt_token_ids = state.request_state.prompt_ids
        self.request_state = state.request_state
        self.made: float | None = None  # when the engine made the oldest token that the last update brought
        self._state = state
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._over = False

    @property
    def at_fault(self) -> bool:
        """Whether the request itself caused the error that it ended with."""
        return self._state.at_fault

    async def _next_update(self) -> bool:
        """Wait until `request_state` has moved. False: the reader knows its end already."""
        state = self._state
        while not self._over and not state.moved:
            state.waiter = self._loop.create_future()
            await state.waiter
        if self._over:
            return False
        self.mark_read()
        return True

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `request_state` has moved, in the middle of the delivery; it must `mark_read`."""
        self._state.listener = listener
        if self._state.moved:
            listener()

    def mark_read(self) -> None:
        """The reader looks at `request_state` now: what is there is no longer new."""
        state = self._state
        state.moved = False
        self.made, state.made = state.made, None
        self._over = self.request_state.finished

    async def last(self) -> RequestOutput:
        """The complete answer; nobody is woken before it is there."""
        self._state.final_only = True
        while await self._next_update() and not self._over:
            pass
        return self.request_state.output()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The newest output. A request that failed ends with finish_reason "error" and says why in `.error`."""
        if not await self._next_update():
            raise StopAsyncIteration
        return self.request_state.output()

    async def aclose(self) -> None:
        """Cancel the request unless it is finished."""
        self._over = True
        self._drop(self._state)

    def __del__(self) -> None:
        if not self._over and not self._loop.is_closed():  # any thread may collect garbage
            self._loop.call_soon_threadsafe(self._drop, self._state)


class StreamState:
    """A request on its way, as its stream and the service share it."""

    __slots__ = ("at_fault", "final_only", "generation", "listener", "made", "moved", "request_state", "waiter")

    def __init__(self, request_state: RequestState, generation: int) -> None:
        self.request_state = request_state
        self.generation = generation  # of the engine that was up when it came
        self.at_fault = False  # its error is of its own making
        self.moved = False
        self.made: float | None = None  # when the engine made the oldest token that nobody has read
        self.final_only = False  # its reader wants nothing but the end
        self.waiter: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None

    def notify(self, made: float | None = None) -> None:
        """It has moved; `made` is when the engine made what is new."""
        if self.final_only and not self.request_state.finished:
            return
        self.moved = True
        if self.made is None:
            self.made = made
        if self.listener is not None:
            self.listener()
        elif self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
