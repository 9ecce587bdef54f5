"""CacheView: what one replica's prefix cache holds, as told by numbered events, and by a snapshot after a gap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.routing.block_index import BlockIndex

MOST_AHEAD = 256  # events that are kept while one before them is missing


@dataclass(frozen=True)
class CacheEvent:
    """What changed in a replica's prefix cache. `epoch` names the life of an engine: one that is later is larger, and
    starts empty."""

    epoch: int
    sequence: int  # 1, 2, 3, ... in an epoch
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class CacheSnapshot:
    """All that a replica's prefix cache holds after the event `sequence` of an epoch (0: before the first)."""

    epoch: int
    sequence: int
    identities: tuple[bytes, ...] = ()


class CacheView:
    """Events and snapshots may come twice, late or not at all. What the view holds is what was true at (`epoch`,
    `sequence`); where it is not `is_current`, more is known to have happened since, and a snapshot is needed."""

    def __init__(
        self, replica: int, known: BlockIndex, forget: Callable[[tuple[bytes, ...]], None] = lambda identities: None
    ) -> None:
        """`forget` is told what the replica no longer has, for those who believe more than events say."""
        self.epoch = self.sequence = 0
        self.is_current = False
        self._replica = replica
        self._known = known
        self._forget = forget
        self._ahead: dict[tuple[int, int], CacheEvent] = {}  # (epoch, sequence): what came while one before it had not

    def take(self, event: CacheEvent) -> bool:
        """Returns whether the view is current: False means that a snapshot is needed."""
        at = event.epoch, event.sequence
        if at > (self.epoch, self.sequence):
            self._ahead[at] = event
            while len(self._ahead) > MOST_AHEAD:
                del self._ahead[min(self._ahead)]  # a snapshot is needed anyway, and it will hold the oldest of them
            self._catch_up()
        return self.is_current

    def reset(self, snapshot: CacheSnapshot) -> bool:
        """Begin anew with a snapshot; events after it that came before it are not lost."""
        at = snapshot.epoch, snapshot.sequence
        if at >= (self.epoch, self.sequence):
            gone = set(self._known.identities(self._replica)).difference(snapshot.identities)
            self._known.remove(self._replica, gone)
            self._forget(tuple(gone))
            self._known.add(self._replica, snapshot.identities)
            self.epoch, self.sequence = at
            self._catch_up()
        return self.is_current

    def clear(self) -> None:
        """The replica is gone, and what it had with it."""
        self._known.clear(self._replica)
        self.epoch = self.sequence = 0
        self.is_current = False
        self._ahead = {}

    def _catch_up(self) -> None:
        self._ahead = {at: one for at, one in self._ahead.items() if at > (self.epoch, self.sequence)}
        while (event := self._ahead.pop((self.epoch, self.sequence + 1), None)) is not None:
            self._known.remove(self._replica, event.evicted)
            self._forget(event.evicted)
            self._known.add(self._replica, event.stored)
            self.sequence += 1
        self.is_current = self.epoch > 0 and not self._ahead
