"""CacheFeed: what the engine's prefix cache holds, kept for those outside who follow it, as numbered events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

from tokenmill.kv.prefix import IDENTITY_BYTES
from tokenmill.routing.cache_view import CacheEvent, CacheSnapshot
from tokenmill.serve.engine import wire

MOST_RECENT = 512  # events: who is further behind is sent a snapshot


class CacheFeed:
    """Asks the engine to tell only while somebody follows. Another engine, or another beginning, is another epoch."""

    def __init__(self) -> None:
        self._epoch = self._sequence = 0  # epoch 0: nothing is known
        self._held: dict[bytes, None] = {}
        self._recent: deque[CacheEvent] = deque(maxlen=MOST_RECENT)
        self._followers: set[asyncio.Event] = set()
        self._send: Callable[[wire.ToEngine], None] | None = None

    @contextlib.contextmanager
    def followed(self) -> Iterator[asyncio.Event]:
        """The event is set whenever there is news; who waits for it clears it."""
        follower = asyncio.Event()
        self._followers.add(follower)
        if len(self._followers) == 1 and self._send is not None:
            self._send(wire.FollowCache())
        try:
            yield follower
        finally:
            self._followers.discard(follower)
            if not self._followers:
                self._forget()
                if self._send is not None:
                    self._send(wire.FollowCache(False))

    def since(self, epoch: int, sequence: int) -> list[CacheEvent | CacheSnapshot]:
        """What happened after a position: the events, or all that there is where these are not there any more."""
        if not self._epoch or (epoch, sequence) == (self._epoch, self._sequence):
            return []
        missed = self._sequence - sequence
        if epoch == self._epoch and missed <= len(self._recent):
            return [self._recent[at] for at in range(len(self._recent) - missed, len(self._recent))]
        return [CacheSnapshot(self._epoch, self._sequence, tuple(self._held))]

    # -- what the service tells -----------------------------------------------------------------------------------

    def attach(self, send: Callable[[wire.ToEngine], None]) -> None:
        self._send = send
        if self._followers:
            send(wire.FollowCache())

    def lost(self) -> None:
        """The engine is gone with all that it had."""
        self._send = None
        self._forget()
        if self._followers:
            self._begin(())

    def take(self, message: wire.CacheChange) -> None:
        if not self._followers:
            return  # it was said before the engine heard that nobody follows
        stored, evicted = _identities(message.stored), _identities(message.evicted)
        if message.whole:
            self._begin(stored)
            return
        if not self._epoch:
            return
        self._sequence += 1
        for identity in evicted:
            self._held.pop(identity, None)
        self._held.update(dict.fromkeys(stored))
        self._recent.append(CacheEvent(self._epoch, self._sequence, stored, evicted))
        self._wake()

    def _begin(self, held: tuple[bytes, ...]) -> None:
        self._forget()
        self._epoch, self._held = time.time_ns(), dict.fromkeys(held)
        self._wake()

    def _forget(self) -> None:
        self._epoch = self._sequence = 0
        self._held = {}
        self._recent.clear()

    def _wake(self) -> None:
        for follower in self._followers:
            follower.set()


def _identities(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + IDENTITY_BYTES] for at in range(0, len(joined), IDENTITY_BYTES))
