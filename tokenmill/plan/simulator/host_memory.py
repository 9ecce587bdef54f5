"""Host memory beside a simulated replica: the real slots, and links whose copies end at moments of simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill.kv.manager import KVManager
from tokenmill.kv.tiers.queued import MOST_WAITING
from tokenmill.kv.tiers.slots import Slots
from tokenmill.kv.transfers import Bell, Tier, Transfers
from tokenmill.kv.transport import Done
from tokenmill.step_time import StepTimeModel


@dataclass(frozen=True)
class HostMemory:
    """What a replica has of it, as `kv_host_memory`, and how fast its link is."""

    bytes: int
    bandwidth: float  # bytes/s, in each direction


@dataclass(slots=True)
class _Ticket:
    number: int
    due: float
    seconds: float  # of copying
    identities: list[bytes]
    slots: list[int]  # that are read
    salt: str | None  # None: a read
    dropped: set[bytes] = field(default_factory=set)


class SimulatedHostTier:
    """A Transport. Copies of one direction go one after the other; none fails."""

    name = "host memory"

    def __init__(self, memory: HostMemory, block_bytes: int, clock: Callable[[], float]) -> None:
        self.slots = Slots(memory.bytes // block_bytes)
        self._block_seconds = block_bytes / memory.bandwidth
        self._clock = clock
        self._open: list[_Ticket] = []
        self._free_at = {True: 0.0, False: 0.0}  # of each direction: is it a read
        self._number = 0

    @property
    def next_due(self) -> float | None:
        return min((one.due for one in self._open), default=None)

    def lookup(self, identities: Sequence[bytes]) -> int:
        return self.slots.leading(list(identities))

    def read(self, identities: Sequence[bytes], blocks: Sequence[int]) -> int | None:
        slots: list[int] = []
        for identity in identities[: self.lookup(identities)]:
            slot = self.slots.use(identity)
            assert slot is not None
            slots.append(slot)
        return self._ask(list(identities), slots, None)

    def write(self, identities: Sequence[bytes], blocks: Sequence[int], salt: str) -> int | None:
        return self._ask(list(identities), [], salt)

    def lease(self, identities: Sequence[bytes], seconds: float) -> int:
        count = self.lookup(identities)
        for identity in identities[:count]:
            self.slots.lease(identity, self._clock() + seconds)
        return count

    def discard(self, identities: Sequence[bytes]) -> None:
        for identity in identities:
            self.slots.drop(identity)
        for one in self._open:
            one.dropped.update(identities)

    def forget(self, salt: str | None) -> None:
        self.slots.drop_salt(salt)
        for one in self._open:
            if salt is None or one.salt == salt:
                one.dropped.update(one.identities)

    def usage(self) -> tuple[int, int]:
        return len(self.slots), self.slots.count

    def poll(self) -> list[Done]:
        now = self._clock()
        due = sorted((one for one in self._open if one.due <= now), key=lambda one: one.due)
        self._open = [one for one in self._open if one.due > now]
        return [self._end(one, now) for one in due]

    def close(self) -> None:
        self._open.clear()

    def _ask(self, identities: list[bytes], slots: list[int], salt: str | None) -> int | None:
        if len(self._open) >= MOST_WAITING:
            for identity, slot in zip(identities, slots):
                self.slots.done(identity, slot)
            return None
        seconds = self._block_seconds * (len(identities) if salt is not None else len(slots))
        due = self._free_at[salt is None] = max(self._free_at[salt is None], self._clock()) + seconds
        self._number += 1
        self._open.append(_Ticket(self._number, due, seconds, identities, slots, salt))
        return self._number

    def _end(self, one: _Ticket, now: float) -> Done:
        arrived = len(one.slots)
        for identity, slot in zip(one.identities, one.slots):
            self.slots.done(identity, slot)
        if one.salt is not None:
            arrived = self._keep(one, one.salt, now)
        return Done(one.number, arrived, one.seconds)

    def _keep(self, one: _Ticket, salt: str, now: float) -> int:
        for number, identity in enumerate(one.identities):
            if identity in self.slots or identity in one.dropped:
                continue
            slot = self.slots.take(salt, now)
            if slot is None:
                return number
            self.slots.keep(identity, salt, slot)
        return len(one.identities)


def transfers_of(
    memory: HostMemory,
    kv: KVManager,
    block_bytes: int,
    step_time: StepTimeModel,
    clock: Callable[[], float],
    bell: Bell,
) -> tuple[Transfers, SimulatedHostTier]:
    """The engine's own decisions about what moves, over a simulated link."""
    tier = SimulatedHostTier(memory, block_bytes, clock)
    return Transfers(kv, [Tier(tier)], block_bytes, bell, clock, step_time), tier
