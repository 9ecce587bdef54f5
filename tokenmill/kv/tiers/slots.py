"""Slots: which of a tier's places holds which block, and who has to leave for a new one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    slot: int
    salt: str
    pins: int = 0  # readers
    lease: float = 0.0  # until then it stays


class Slots:
    """The least recently used leaves. A salt that holds more than its share makes room for itself before others do.

    Not thread-safe. A slot that is taken belongs to its writer until `keep` or `give_back`, and nobody finds it.
    """

    def __init__(self, count: int = 0, share: float = 0.5) -> None:
        """share: of all slots that one salt (but the empty one, which is nobody's in particular) may hold."""
        self._free = list(range(count - 1, -1, -1))
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # least recently used first
        self._of_salt: dict[str, OrderedDict[bytes, None]] = {}
        self._lost: dict[int, int] = {}  # slots that were forgotten while they were read -> readers
        self._leases: dict[bytes, float] = {}
        self._share = share
        self._taken = 0
        self.count = count
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._held

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, slots: range) -> None:
        """More room."""
        self._free += reversed(slots)
        self.count += len(slots)

    def restore(self, identity: bytes, salt: str, slot: int) -> None:
        """A slot that held something all along, in the order of use; an older one of the same name is free."""
        self.count += 1
        old = self._forget(identity)
        if old is not None:
            self._free.append(old)
        self._hold(identity, salt, slot)

    def leading(self, identities: list[bytes]) -> int:
        for count, identity in enumerate(identities):
            if identity not in self._held:
                return count
        return len(identities)

    def use(self, identity: bytes) -> int | None:
        """Where it is, kept there until `done`."""
        held = self._held.get(identity)
        if held is None:
            return None
        held.pins += 1
        self._held.move_to_end(identity)
        self._of_salt[held.salt].move_to_end(identity)
        return held.slot

    def done(self, identity: bytes, slot: int) -> None:
        held = self._held.get(identity)
        if held is not None and held.slot == slot:
            held.pins -= 1
        else:  # it was forgotten while it was read
            self._lost[slot] -= 1
            if not self._lost[slot]:
                del self._lost[slot]
                self._free.append(slot)

    def take(self, salt: str, now: float) -> int | None:
        """A slot to write to; None: all are read, leased or written to."""
        own = self._of_salt.get(salt)
        if salt and own is not None and len(own) >= max(1, int(self._share * self.count)):
            slot = self._evict(own, now)
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._evict(self._held, now)
        self._taken += slot is not None
        return slot

    def keep(self, identity: bytes, salt: str, slot: int) -> None:
        """What was written to the slot can be found."""
        self._taken -= 1
        if identity in self._held:
            self._free.append(slot)
        else:
            self._hold(identity, salt, slot)

    def give_back(self, slot: int) -> None:
        self._taken -= 1
        self._free.append(slot)

    def lease(self, identity: bytes, until: float) -> bool:
        held = self._held.get(identity)
        if held is not None:
            held.lease = max(held.lease, until)
            self._leases[identity] = held.lease
        return held is not None

    def num_leased(self, now: float) -> int:
        """How many are kept for somebody."""
        self._leases = {identity: until for identity, until in self._leases.items() if until > now}
        return len(self._leases)

    def drop(self, identity: bytes) -> int | None:
        """Nobody finds it any more; the slot that it is in, whoever may still read there."""
        held = self._held.get(identity)
        if held is None:
            return None
        slot = self._forget(identity)
        if slot is not None:
            self._free.append(slot)
        return held.slot

    def drop_salt(self, salt: str | None) -> list[int]:
        names = list(self._held) if salt is None else list(self._of_salt.get(salt, ()))
        return [slot for identity in names if (slot := self.drop(identity)) is not None]

    def check(self) -> None:
        slots = [one.slot for one in self._held.values()] + self._free + list(self._lost)
        if len(set(slots)) != len(slots) or len(slots) + self._taken != self.count:
            raise AssertionError(f"{self.count} slots, but {len(slots)} are held or free and {self._taken} taken")
        if sum(map(len, self._of_salt.values())) != len(self._held):
            raise AssertionError("salts and names disagree")

    def _hold(self, identity: bytes, salt: str, slot: int) -> None:
        self._held[identity] = _Held(slot, salt)
        self._of_salt.setdefault(salt, OrderedDict())[identity] = None

    def _evict(self, candidates: OrderedDict[bytes, _Held] | OrderedDict[bytes, None], now: float) -> int | None:
        for identity in candidates:
            held = self._held[identity]
            if not held.pins and held.lease <= now:
                self.evicted += 1
                return self._forget(identity)
        return None

    def _forget(self, identity: bytes) -> int | None:
        """Its slot, if nobody reads it any more."""
        held = self._held.pop(identity, None)
        if held is None:
            return None
        self._leases.pop(identity, None)
        own = self._of_salt[held.salt]
        del own[identity]
        if not own:
            del self._of_salt[held.salt]
        if held.pins:
            self._lost[held.slot] = held.pins
            return None
        return held.slot
