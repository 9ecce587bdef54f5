"""RoutedStreams: the streams that came through routers, and for a while those whose router has vanished.

A router that lives says which requests nobody waits for any more, and these end at once. A connection that breaks
without a word is a router that is gone: its streams run on, because their clients will come with another router and
the id of their last event. What nobody fetched is given up after LEASE_SECONDS, or earlier where it is too much.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.engine.request import Finish
from tokenmill.serve.engine_client.resume import ResumedSequence
from tokenmill.serve.engine_client.streams import Stream

LEASE_SECONDS = 30.0
MOST_LEFT = 1024  # streams without a router, running or complete
MOST_BYTES = 64 << 20  # of these, as far as Python's lists of tokens tell
MOST_TOLD = 4096  # cancelled requests that are remembered: the word may be here before its request
LOOK = 1.0  # seconds between two looks at what has been left
TOKEN_BYTES, LOGPROB_BYTES = 40, 400


@dataclass(eq=False)
class RoutedStream:
    """One attempt of a router's at a request that is streamed."""

    tenant: str
    request: str  # its id, the same in all attempts
    name: str  # of this attempt
    streams: list[Stream]  # one per prompt
    give_up: Callable[[], object]  # end them
    left: float | None = None  # when its router vanished
    counted: int = 0  # bytes, when that was looked at last

    @property
    def size(self) -> int:
        states = [one.request_state for one in self.streams]
        tokens = sum(len(one.prompt_ids) + sum(each.num_tokens for each in one.sequences) for one in states)
        logprobs = sum(len(each.request.logprobs) for one in states for each in one.sequences)
        return TOKEN_BYTES * tokens + LOGPROB_BYTES * logprobs

    def said(self, number: int, prompt: list[int]) -> list[ResumedSequence] | None:
        """What the sequences of a prompt have said so far. None: nothing that one could go on from."""
        if number >= len(self.streams) or self.streams[number].request_state.prompt_ids != prompt:
            return None
        found = []
        for one in self.streams[number].request_state.sequences:
            if one.finish not in (None, Finish.STOP, Finish.LENGTH):
                return None
            logprobs = one.request.logprobs[: one.num_tokens] if one.request.logprobs else None
            found.append(ResumedSequence(one.tokens_from(0), logprobs, one.finish and str(one.finish)))
        return found


class RoutedStreams:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._here: dict[str, RoutedStream] = {}  # by name
        self._named: dict[str, set[str]] = {}  # the attempts at a request
        self._left: OrderedDict[str, None] = OrderedDict()  # the first to be given up first
        self._told: OrderedDict[str, None] = OrderedDict()  # cancelled before they were here, or after
        self._looking = False
        self._bytes = 0  # of those that were left

    def enter(self, one: RoutedStream) -> None:
        """It takes the place of other attempts at its request, whose routers may not know yet that they are over."""
        for name in list(self._named.get(one.request, ())):
            if (other := self._here[name]).tenant == one.tenant:
                self.drop(other)
        self._here[one.name] = one
        self._named.setdefault(one.request, set()).add(one.name)

    def leave(self, one: RoutedStream) -> bool:
        """Its connection is over. Returns whether it is kept; else nobody wants it, or it was given up already."""
        if self._here.get(one.name) is not one:
            return False
        if one.name in self._told:
            self._remove(one.name)
            return False
        one.left = self._clock()
        self._left[one.name] = None
        for stream in one.streams:
            stream.set_listener(stream.mark_read)
        self._count(one)
        self.tidy()
        if not self._looking:
            self._look_later()
        return one.name in self._here

    def end(self, one: RoutedStream) -> None:
        """It ended otherwise: with an error, or because it was cancelled."""
        if self._here.get(one.name) is one and one.left is None:
            self._remove(one.name)

    def cancel(self, names: list[str]) -> None:
        """A router says that nobody waits for these."""
        for name in names:
            self._told[name] = None
            if (found := self._here.get(name)) is not None:
                self.drop(found)
        while len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)

    def find(self, request: str, tenant: str | None = None) -> RoutedStream | None:
        """The attempt at a request that has come furthest."""
        found = [self._here[name] for name in self._named.get(request, ())]
        return max((one for one in found if tenant in (None, one.tenant)), key=lambda one: one.size, default=None)

    def drop(self, one: RoutedStream) -> None:
        self._remove(one.name)
        one.give_up()

    def tidy(self) -> None:
        late = self._clock() - LEASE_SECONDS
        while self._left:
            one = self._here[next(iter(self._left))]
            assert one.left is not None
            if one.left >= late and len(self._left) <= MOST_LEFT and self._bytes <= MOST_BYTES:
                break
            self.drop(one)

    def __len__(self) -> int:
        """How many are kept without a router."""
        return len(self._left)

    def _remove(self, name: str) -> None:
        if (one := self._here.pop(name, None)) is None:
            return
        if name in self._left:
            del self._left[name]
            self._bytes -= one.counted
        self._named[one.request].discard(name)
        if not self._named[one.request]:
            del self._named[one.request]

    def _count(self, one: RoutedStream) -> None:
        self._bytes -= one.counted
        one.counted = one.size
        self._bytes += one.counted

    def _look_later(self) -> None:
        self._looking = bool(self._left)
        if self._looking:
            asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        for name in self._left:  # they run on
            self._count(self._here[name])
        self.tidy()
        self._look_later()
