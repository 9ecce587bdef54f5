"""BlockIndex: which replicas hold which blocks, by identity, for many replicas at once and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockIndex:
    """A set of identities per replica. Replicas are bits of a mask: one walk along a prompt answers for all of them.

    At most `limit` identities per replica; beyond it, the one that was added first is forgotten. To know less than a
    replica has costs a longer prompt there, never a wrong answer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._masks: dict[bytes, int] = {}
        self._of: dict[int, dict[bytes, None]] = {}  # replica -> its identities, oldest first

    def __len__(self) -> int:
        return len(self._masks)

    def identities(self, replica: int) -> list[bytes]:
        return list(self._of.get(replica, ()))

    def mask(self, identity: bytes) -> int:
        return self._masks.get(identity, 0)

    def add(self, replica: int, identities: Iterable[bytes]) -> None:
        """The replica holds these, too; those it holds already become its newest."""
        own, masks, bit = self._of.setdefault(replica, {}), self._masks, 1 << replica
        for identity in identities:
            own.pop(identity, None)
            own[identity] = None
            masks[identity] = masks.get(identity, 0) | bit
        while len(own) > self._limit:
            self._drop(next(iter(own)), replica, own)

    def remove(self, replica: int, identities: Iterable[bytes]) -> None:
        own = self._of.get(replica)
        if own:
            for identity in identities:
                if identity in own:
                    self._drop(identity, replica, own)

    def clear(self, replica: int) -> None:
        self.remove(replica, self.identities(replica))
        self._of.pop(replica, None)

    def _drop(self, identity: bytes, replica: int, own: dict[bytes, None]) -> None:
        del own[identity]
        if left := self._masks[identity] & ~(1 << replica):
            self._masks[identity] = left
        else:
            del self._masks[identity]


def leading(indexes: Sequence[BlockIndex], chain: Sequence[bytes], replicas: int) -> list[tuple[int, int]]:
    """How many of the chain's first blocks the replicas of a mask hold in one of the indexes or another: (mask of
    replicas, blocks), the longest first. Replicas that hold none are not named."""
    found: list[tuple[int, int]] = []
    for depth, identity in enumerate(chain):
        held = 0
        for index in indexes:
            held |= index.mask(identity)
        if lost := replicas & ~held:
            if depth:
                found.append((lost, depth))
            replicas &= held
        if not replicas:
            break
    if replicas and chain:
        found.append((replicas, len(chain)))
    return found[::-1]
