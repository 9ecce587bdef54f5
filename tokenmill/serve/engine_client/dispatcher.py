"""Dispatcher: hands what the engine said to those who wait for it, and sees every request to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenmill.engine.request import Finish
from tokenmill.follow import Follow
from tokenmill.front import Front
from tokenmill.serve.engine_client.remote_engine import RemoteEngine
from tokenmill.serve.engine_client.stream import Stream, StreamState

log = logging.getLogger("tokenmill.serve")

EXPIRY_GRACE = 0.25  # seconds after a deadline before the front ends what the engine should have ended


class Dispatcher:
    """One `StreamState` per request that is not finished. Whatever ends a request, it is closed exactly once."""

    front: Front  # there once an engine has told its facts

    def __init__(self, remote: RemoteEngine, on_end: Callable[[StreamState], None]) -> None:
        self.active: dict[str, StreamState] = {}
        self._remote = remote
        self._on_end = on_end

    def open(self, follow: Follow, generation: int) -> Stream:
        """Hand a prepared request to the engine. Raises what `Front.submit` raises."""
        self.front.submit(follow)
        state = self.active[follow.id] = StreamState(follow, generation)
        if follow.timeout is not None:
            loop = asyncio.get_running_loop()
            state.timer = loop.call_later(follow.timeout + EXPIRY_GRACE, self._expire, state)
        return Stream(state, self.drop)

    def deliver(self, made: float | None = None) -> None:
        """Give what arrived to those who wait for it; `made` is when the engine made it."""
        for delta in self._remote.step():
            id = delta.request.id
            state = self.active.get(id) or self.active.get(id.partition("/")[0])
            try:
                moved = self.front.take_in([delta])
            except Exception as error:  # one answer that cannot be decoded is no other's trouble
                log.exception("request %s cannot be followed", id)
                if state is not None:
                    state.follow.leader.error = f"{type(error).__name__}: {error}"
                    self.drop(state, Finish.ERROR)
                continue
            if id in self._remote.at_fault:
                self._remote.at_fault.discard(id)
                if state is not None:
                    state.at_fault = True
            if moved and state is not None:
                state.wake(made)
                if state.follow.finished:
                    self._close(state)

    def drop(self, state: StreamState, why: Finish = Finish.CANCELLED) -> None:
        """End a request from this side."""
        if self.active.get(state.follow.id) is not state:
            return
        for sequence in state.follow.sequences:
            sequence.finish = sequence.finish or why
        self.front.cancel(state.follow)
        state.wake()
        self._close(state)

    def _expire(self, state: StreamState) -> None:
        """Its deadline has passed and no engine was there to say so."""
        leader = state.follow.leader
        late = self._remote.clock() - leader.arrival
        leader.error = leader.error or f"its deadline passed {late:.3f} s after it arrived"
        self.drop(state, Finish.DEADLINE)

    def _close(self, state: StreamState) -> None:
        if self.active.pop(state.follow.id, None) is None:
            return
        if state.timer is not None:
            state.timer.cancel()
        self._on_end(state)
