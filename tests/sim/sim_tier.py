"""A tier in simulated time: its copies are slow, fail, come torn and out of order, and it sees blocks being misused."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.kv.transport import Done

NOISE = -987_654_321  # what lies in a block that is read into


@dataclass
class Troubles:
    """Probabilities per ticket."""

    fail: float = 0.0
    torn: float = 0.0
    slow: float = 0.0  # a hundred times as long
    stuck: float = 0.0  # a minute
    seconds: float = 2e-3  # of a usual ticket, at most
    per_block: float = 0.0  # and beyond that, at most


@dataclass
class _Ticket:
    number: int
    due: float
    seconds: float
    identities: list[bytes]
    blocks: list[int]
    salt: str | None  # None: a read
    dropped: set[bytes]
    held: list[list[int] | None]  # what is read, as it is when the reading begins


class SimulatedTier:
    """Copies are made at the moment that they are told of, so that a block given away too early is seen."""

    def __init__(
        self, name: str, runner: SimulatedRunner, clock: SimulatedClock, room: int, troubles: Troubles, seed: int = 0
    ) -> None:
        self.name, self.runner, self.clock, self.room, self.troubles = name, runner, clock, room, troubles
        self.rng = random.Random(seed)
        self.store: OrderedDict[bytes, tuple[str, list[int]]] = OrderedDict()
        self.most_waiting = 8
        self._tickets: list[_Ticket] = []
        self._number = 0
        self.events = {"read": 0, "written": 0, "failed": 0, "torn": 0, "refused": 0}

    def lookup(self, identities):
        count = 0
        for identity in identities:
            if identity not in self.store:
                break
            count += 1
        return count

    def read(self, identities, blocks):
        held = [list(self.store[one][1]) if one in self.store else None for one in identities]
        ticket = self._open(identities, blocks, None, held)
        if ticket is not None:
            for block in blocks:
                self._write(block, [NOISE] * self.runner.block_size)
        return ticket

    def write(self, identities, blocks, salt):
        return self._open(identities, blocks, salt, [])

    def lease(self, identities, seconds):
        return self.lookup(identities)

    def discard(self, identities):
        for identity in identities:
            self.store.pop(identity, None)
        for ticket in self._tickets:
            ticket.dropped.update(identities)

    def forget(self, salt):
        for identity, (owner, _) in list(self.store.items()):
            if salt in (None, owner):
                del self.store[identity]
        for ticket in self._tickets:
            if salt is None or ticket.salt == salt:
                ticket.dropped.update(ticket.identities)

    def usage(self):
        return len(self.store), self.room

    def poll(self):
        due = [one for one in self._tickets if one.due <= self.clock.now]
        self._tickets = [one for one in self._tickets if one.due > self.clock.now]
        return [self._end(one) for one in sorted(due, key=lambda one: one.due)]

    def close(self):
        self._tickets.clear()

    @property
    def next_due(self):
        return min((one.due for one in self._tickets), default=None)

    def _open(self, identities, blocks, salt, held):
        if len(self._tickets) >= self.most_waiting:
            self.events["refused"] += 1
            return None
        self._number += 1
        seconds = self.rng.random() * (self.troubles.seconds + self.troubles.per_block * len(blocks))
        if self.rng.random() < self.troubles.slow:
            seconds *= 100
        if self.rng.random() < self.troubles.stuck:
            seconds = 60.0
        due = self.clock.now + seconds
        self._tickets.append(_Ticket(self._number, due, seconds, list(identities), list(blocks), salt, set(), held))
        return self._number

    def _end(self, ticket):
        count, failure = len(ticket.blocks), None
        if self.rng.random() < self.troubles.fail:
            count, failure = 0, "injected failure"
            self.events["failed"] += 1
        elif self.rng.random() < self.troubles.torn:
            count, failure = self.rng.randrange(count), "injected torn data"
            self.events["torn"] += 1
        if ticket.salt is None:
            return Done(ticket.number, self._read_in(ticket, count), ticket.seconds, failure)
        for identity, block in list(zip(ticket.identities, ticket.blocks))[:count]:
            if identity not in ticket.dropped:
                self.store[identity] = ticket.salt, self._read(block)
                self.events["written"] += 1
            while len(self.store) > self.room:
                self.store.popitem(last=False)
        return Done(ticket.number, count, ticket.seconds, failure)

    def _read_in(self, ticket, count):
        for number, (block, held) in enumerate(zip(ticket.blocks, ticket.held)):
            if self._read(block) != [NOISE] * self.runner.block_size:
                self.runner.violations.append(f"block {block} was written to while a transfer read into it")
            if held is None:
                count = min(count, number)
            self._write(block, held if number < count else [NOISE - 1] * self.runner.block_size)
        self.events["read"] += count
        return count

    def _read(self, block):
        size = self.runner.block_size
        return self.runner._memory[block * size : (block + 1) * size]

    def _write(self, block, values):
        size = self.runner.block_size
        self.runner._memory[block * size : (block + 1) * size] = values


class SimulatedBell:
    """Whoever waits for a copy moves the clock."""

    def __init__(self, clock: SimulatedClock, tiers: list[SimulatedTier]) -> None:
        self.clock, self.tiers = clock, tiers

    def wait(self, seconds):
        due = [one.next_due for one in self.tiers if one.next_due is not None]
        self.clock.wait_until(min([self.clock.now + seconds, *due]))
