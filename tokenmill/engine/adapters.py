"""AdapterPool: which LoRA adapters there are, which of them have a slot on the device, and who waits for one; no torch.

A request holds the slot of its adapter from the moment it is queued until it ends. One whose adapter has no slot is
parked (Wait.ADAPTER) and asked for here: slots that nobody holds go to whoever has waited longest. Where all are held,
as many as there are adapters that wait are closed to newcomers, so that they come free when those who hold them end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from tokenmill.engine.request import BATCH, REALTIME, Request
from tokenmill.errors import InvalidRequest

NO_SLOT = -1
PATIENCE = 30.0  # seconds after which a request that waits for a slot goes before more important ones


class AdapterSource(Protocol):
    """Where adapters are kept that have no slot, and how they come to have one. Nothing of it waits but `wait`."""

    @property
    def busy(self) -> bool:
        """Whether something is read."""
        ...

    def bring(self, key: str) -> bool:
        """Whether it is in the host's memory, to stay until the next `arrived`. If not it is read as soon as there is
        room, which is asked for again and again.
        """
        ...

    def arrived(self) -> list[tuple[str, str | None]]:
        """Reads that have ended since the last call: key, and why not."""
        ...

    def place(self, key: str, slot: int) -> None:
        """Put one that is in the host's memory into a slot."""
        ...

    def drop(self, key: str) -> None:
        """Nobody will ask for it again."""
        ...

    def wait(self, seconds: float) -> None:
        """For the end of a read, at most so long."""
        ...


@dataclass
class AdapterStats:
    loads: int = 0  # into a slot
    evictions: int = 0  # out of one, for another


@dataclass(eq=False)
class Adapter:
    """What the pool knows of one, by its key: its names may be several, or have been taken from it."""

    key: str
    names: set[str] = field(default_factory=set)
    slot: int = NO_SLOT
    closed: bool = False  # newcomers wait until others have had its slot
    last_used: int = 0
    users: set[str] = field(default_factory=set)  # ids of all requests that are not finished
    holders: dict[str, Request] = field(default_factory=dict)
    waiting: dict[str, tuple[Request, int | None]] = field(default_factory=dict)  # and their places in the queue
    most_urgent: int = BATCH  # class of those who wait


class AdapterPool:
    def __init__(self, slots: int, source: AdapterSource) -> None:
        self.source = source
        self.names: dict[str, Adapter] = {}
        self.stats = AdapterStats()
        self._adapters: dict[str, Adapter] = {}  # by key
        self._slots: list[Adapter | None] = [None] * slots
        self._waiting: dict[str, Adapter] = {}  # those that somebody waits for
        self._clock = count(1)
        self.first: str | None = None  # key of the one that has to have a slot before all others

    # -- names ------------------------------------------------------------------------------------------------

    def register(self, name: str, key: str) -> None:
        """A name stands for these weights from now on; who runs under it goes on with those that it began with."""
        if (before := self.names.get(name)) is not None and before.key != key:
            self.unregister(name)
        adapter = self.names[name] = self._adapters.setdefault(key, Adapter(key))
        adapter.names.add(name)

    def unregister(self, name: str) -> None:
        adapter = self.names.pop(name, None)
        if adapter is None:
            raise InvalidRequest(f"there is no adapter {name!r:.100}; {self.known()}")
        adapter.names.discard(name)
        self._forget_unused(adapter)

    def known(self) -> str:
        some = sorted(self.names)[:8]
        more = f" and {len(self.names) - len(some)} more" if len(self.names) > len(some) else ""
        return f"there are {', '.join(some)}{more}" if some else "none is loaded"

    def key_of(self, name: str) -> str:
        """Raises InvalidRequest for a name that stands for nothing; other names may be those of other tenants."""
        if name not in self.names:
            raise InvalidRequest(f"there is no adapter {name!r:.100}")
        return self.names[name].key

    @property
    def num_resident(self) -> int:
        return sum(one is not None for one in self._slots)

    # -- slots ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return sum(len(one.waiting) for one in self._waiting.values())

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def enter(self, request: Request) -> None:
        """A request that names an adapter is accepted: its weights stay known until the request has ended."""
        self._adapters[request.adapter_key].users.add(request.id)

    def acquire(self, request: Request) -> bool:
        """Have the request hold its adapter's slot, if it may have it now."""
        adapter = self._adapters[request.adapter_key]
        if request.id in adapter.holders:
            return True
        # A beam that came late would have the others of its search wait for it, and these hold the slot.
        if adapter.slot == NO_SLOT or (adapter.closed and request.beams is None):
            return False
        self._hold(adapter, request)
        return True

    def ask(self, request: Request, place: int | None) -> None:
        """The request waits for its adapter, and comes back with its place in the queue."""
        adapter = self._adapters[request.adapter_key]
        adapter.waiting[request.id] = request, place
        adapter.most_urgent = min(adapter.most_urgent, request.priority)
        self._waiting[adapter.key] = adapter

    def release(self, request: Request) -> None:
        """It has ended."""
        adapter = self._adapters.get(request.adapter_key)
        if adapter is None:
            return
        if adapter.holders.pop(request.id, None) is not None:
            adapter.last_used = next(self._clock)
        adapter.users.discard(request.id)
        if adapter.waiting.pop(request.id, None) is not None and not adapter.waiting:
            self._nobody_waits(adapter)
        self._forget_unused(adapter)

    def turn(self, now: float) -> tuple[list[tuple[Request, int | None]], list[tuple[Request, str]]]:
        """Give slots to those who wait. Returns who may be queued (with a place), and who fails and why."""
        failed: list[tuple[Request, str]] = []
        for key, error in self.source.arrived():
            if error is not None and (adapter := self._adapters.get(key)) is not None:
                failed += [(request, error) for request, _ in adapter.waiting.values()]
                self._nobody_waits(adapter)
        granted: list[tuple[Request, int | None]] = []
        for adapter in self._slots:
            if adapter is not None:
                adapter.closed = False
        unserved = 0
        for adapter in sorted(self._waiting.values(), key=lambda one: self._rank(one, now)):
            if adapter.slot == NO_SLOT:
                if unserved >= len(self._slots):  # what is read is of use soon
                    continue
                slot = self._free_slot() if self.source.bring(adapter.key) else None
                if slot is None:
                    unserved += 1
                    self._close_one()
                    continue
                self._place(adapter, slot)
            elif adapter.closed:
                unserved += 1
                self._close_one()
                continue
            for request, place in adapter.waiting.values():
                self._hold(adapter, request)
                granted.append((request, place))
            self._nobody_waits(adapter)
        return granted, failed

    def in_the_way(self, request: Request) -> list[Request]:
        """Its adapter goes before all others: those who hold the slot that the fewest hold, if none is free."""
        self.first = request.adapter_key
        taken = [one for one in self._slots if one is not None and one.holders]
        if len(taken) < len(self._slots):
            return []
        return list(min(taken, key=lambda one: len(one.holders)).holders.values())

    def give_back(self, request: Request) -> None:
        """It stops holding its slot for now, and has to ask again."""
        self._adapters[request.adapter_key].holders.pop(request.id, None)

    def lose(self) -> list[Request]:
        """All slots are empty: returns who has to ask again."""
        holders: list[Request] = []
        for adapter in self._slots:
            if adapter is not None:
                holders += adapter.holders.values()
                adapter.holders, adapter.slot, adapter.closed = {}, NO_SLOT, False
        self._slots = [None] * len(self._slots)
        return holders

    def check_integrity(self, alive: dict[str, Request]) -> None:
        """Prove that every slot has one adapter, and that whoever holds or waits is alive."""
        for key, adapter in self._adapters.items():
            if adapter.slot != NO_SLOT and self._slots[adapter.slot] is not adapter:
                raise AssertionError(f"adapter {key} thinks that it has slot {adapter.slot}")
            gone = [id for id in (*adapter.holders, *adapter.waiting) if id not in alive]
            if gone or (adapter.holders and adapter.slot == NO_SLOT):
                raise AssertionError(f"adapter {key} in slot {adapter.slot} is held for {gone or adapter.holders}")
            if bool(adapter.waiting) != (key in self._waiting):
                raise AssertionError(f"adapter {key} is waited for by {len(adapter.waiting)} without being asked for")
        for slot, one in enumerate(self._slots):
            if one is not None and one.slot != slot:
                raise AssertionError(f"slot {slot} has an adapter that is in {one.slot}")

    def _hold(self, adapter: Adapter, request: Request) -> None:
        adapter.holders[request.id] = request
        adapter.last_used = next(self._clock)
        request.slot = adapter.slot

    def _free_slot(self) -> int | None:
        """One that is empty, or else the least recently used of those that nobody holds."""
        if None in self._slots:
            return self._slots.index(None)
        unheld = [one for one in self._slots if one is not None and not one.holders]
        if not unheld:
            return None
        victim = min(unheld, key=lambda one: one.last_used)
        self.stats.evictions += 1
        slot, victim.slot, victim.closed = victim.slot, NO_SLOT, False
        self._slots[slot] = None
        return slot

    def _close_one(self) -> None:
        """One slot more is to come free, for somebody who waits: that with the fewest holders."""
        still_open = [one for one in self._slots if one is not None and one.holders and not one.closed]
        if still_open:
            min(still_open, key=lambda one: (len(one.holders), one.last_used)).closed = True

    def _place(self, adapter: Adapter, slot: int) -> None:
        self.source.place(adapter.key, slot)
        adapter.slot, self._slots[slot] = slot, adapter
        adapter.last_used = next(self._clock)
        self.stats.loads += 1

    def _nobody_waits(self, adapter: Adapter) -> None:
        adapter.waiting.clear()
        adapter.most_urgent = BATCH
        self._waiting.pop(adapter.key, None)
        self.first = None if self.first == adapter.key else self.first

    def _rank(self, adapter: Adapter, now: float) -> tuple[int, float]:
        """Who is next: by class, and in it who was first; who has waited long goes before all classes."""
        since = next(iter(adapter.waiting.values()))[0].arrival
        if adapter.key == self.first:
            return REALTIME - 2, since
        return REALTIME - 1 if now - since > PATIENCE else adapter.most_urgent, since

    def _forget_unused(self, adapter: Adapter) -> None:
        """One without a name goes with the last who uses it."""
        if adapter.names or adapter.users:
            return
        if adapter.slot != NO_SLOT:
            self._slots[adapter.slot] = None
        self._adapters.pop(adapter.key, None)
        self.source.drop(adapter.key)
