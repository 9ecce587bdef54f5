"""Machines: the other machines that have ranks of this engine: who may join, who is there, and what they say."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill import __version__
from tokenmill.engine.ranks.door import Address, heard, listen, tell
from tokenmill.engine.ranks.line import PATIENCE, Line
from tokenmill.engine.ranks.links import LinksOf, linked, make_links
from tokenmill.engine.ranks.orders import Order
from tokenmill.errors import TokenmillError
from tokenmill.parallel.layout import Layout
from tokenmill.peers import Connection, PeerError

log = logging.getLogger("tokenmill.ranks")

Progress = Callable[[int, int, str], None]

TELL_EVERY = 0.2  # seconds between words that somebody is waited for


class RanksAbsentError(TokenmillError):
    """Ranks of other machines did not join in time."""


class Told(Protocol):
    """A generation, as far as ranks of other machines tell what became of its steps."""

    def done(self, rank: int, step: int) -> None: ...

    def fail(self, rank: int, step: int, why: str) -> None: ...


@dataclass(eq=False)
class _Machine:
    name: str  # that it gave itself, of random letters
    ranks: range
    host: str
    port: int  # of its door
    memory: tuple[int, int]  # bytes in all, and free, of each of its ranks
    line: Line


@dataclass(eq=False)
class _Guest:
    """One that is about to join: ranks are kept for it until it says that it is there."""

    name: str
    ranks: range
    connection: Connection


class Machines:
    """Ranks from `here` on are on other machines, which come to this one's door, and come again when they were lost.

    Who knows the secret, has the same version and the same weights is given ranks that nobody has.
    """

    def __init__(
        self, layout: Layout, here: int, address: Address, secret: bytes, setting: str, patience: float
    ) -> None:
        """patience: seconds in which somebody has to join."""
        self.here, self.patience = here, patience
        self.silence = PATIENCE  # seconds after which a machine that says nothing is gone
        self.tells: Callable[[int, Order], None] = lambda rank, word: None
        self._layout, self._secret = layout, secret
        self._machines: dict[int, _Machine] = {}  # by first rank
        self._guests: list[_Guest] = []
        self._welcome: Order | None = None
        self._told: tuple[int, Told] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._door = listen(address, secret, setting, self._join)
        self.address = self._door.address

    def open(self, model: str, fingerprint: str) -> None:
        """Say what everybody has to have; who has come before waits for it."""
        with self._changed:
            self._welcome = {"model": model, "fingerprint": fingerprint}
            self._changed.notify_all()

    def wait(self, tell: Progress) -> None:
        """Until every rank has a machine. Raises RanksAbsentError."""
        began = told = time.monotonic()
        far = self._layout.ranks - self.here
        where = f"{self.address[0]}:{self.address[1]}"
        while missing := self._missing():
            if self._closed:
                raise RanksAbsentError(f"rank {missing[0]} was waited for, and the engine was shut down")
            now = time.monotonic()
            if now - began > self.patience:
                raise RanksAbsentError(
                    f"rank {missing[0]} did not join at {where} within {self.patience:g} s; start `tokenmill rank "
                    "--join` on its machine and look at what it says, or raise rank_patience"
                )
            if now - told > TELL_EVERY:
                told = now
                tell(far - len(missing), far, f"waiting for ranks to join at {where}")
            with self._changed:
                self._changed.wait(TELL_EVERY / 2)

    @property
    def ranges(self) -> list[range]:
        """The ranks of each machine, this one first."""
        with self._changed:
            return [range(self.here), *(self._machines[first].ranks for first in sorted(self._machines))]

    @property
    def hosts(self) -> list[str]:
        with self._changed:
            return [self._machines[first].host for first in sorted(self._machines)]

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Of each machine: bytes in all and free, for each of its ranks."""
        with self._changed:
            return [one.memory for one in self._machines.values()]

    def order(self, rank: int, order: Order) -> bool:
        """Have a rank take part in a generation. A machine is told when its first one is; False: it is gone."""
        with self._changed:
            machine = self._of(rank)
            doors = [
                [one.ranks.start, len(one.ranks), "" if _is_here(one.host) else one.host, one.port]
                for one in self._machines.values()
            ]
        if machine is not None and rank == machine.ranks.start:
            machine.line.tell({"order": order, "first": rank, "count": len(machine.ranks), "doors": doors})
        return machine is not None

    def links(self, generation: int, told: Told, ended: Callable[[], bool]) -> LinksOf | None:
        """Those of this machine's ranks, once the others have called. None: the generation has ended before."""
        self._door.forget(generation)
        self._told = generation, told
        pairs = linked(self._layout, self.ranges)
        return make_links(generation, pairs, range(self.here), self._door, {}, self._secret, ended)

    def send_step(self, generation: int, message: bytes) -> None:
        for machine in self._there():
            machine.line.send_step(generation, message)

    def end(self, generation: int) -> None:
        for machine in self._there():
            machine.line.tell({"end": generation})

    def kill(self, rank: int) -> None:
        with self._changed:
            machine = self._of(rank)
        if machine is not None:
            machine.line.tell({"kill": rank})

    def computed(self, rank: int) -> float | None:
        with self._changed:
            machine = self._of(rank)
        found = None if machine is None else machine.line.beat.get(str(rank))
        return float(found) if isinstance(found, int | float) else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for machine in self._there():
            machine.line.tell({"bye": "the engine was shut down"})
            machine.line.end()
        self._door.close()

    def _there(self) -> list[_Machine]:
        with self._changed:
            return list(self._machines.values())

    def _of(self, rank: int) -> _Machine | None:
        return next((one for one in self._machines.values() if rank in one.ranks), None)

    def _missing(self) -> list[int]:
        with self._changed:
            return [rank for rank in range(self.here, self._layout.ranks) if self._of(rank) is None]

    # In the thread of one who has come

    def _join(self, connection: Connection, said: Order, host: str) -> None:
        asked = said["join"]
        name, count, port = str(asked["name"]), int(asked["ranks"]), int(asked["port"])
        total, free = (int(number) for number in asked["memory"])
        if asked["version"] != __version__:
            self._refuse(
                connection,
                f"this is tokenmill {asked['version']} and the engine is {__version__}; install the same on both",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._welcome is not None)
            welcome = self._welcome
        for machine in self._there():
            if machine.name == name:  # the engine has not noticed yet that it was gone
                self._drop(machine, "it came again")
        self._forget_guest(name)
        guest = self._reserve(name, count, asked.get("had"), connection)
        if guest is None:
            self._refuse(connection, self._why_no_room(count), wait=count <= self._layout.ranks - self.here)
        assert guest is not None and welcome is not None
        ranks = guest.ranks
        try:
            tell(connection, {"welcome": {**welcome, "first": ranks.start}})
            connection.be_patient()  # it may have to fetch the model
            answer = heard(connection)
            if "here" not in answer:
                raise PeerError(str(answer.get("refuses", "it does not join")))
            line = Line(connection, self.silence)
            machine = _Machine(name, ranks, host, port, (total // count, free // count), line)
            with self._changed:
                still = guest in self._guests
                if still:
                    self._machines[ranks.start] = machine
            if not still:
                line.end()
                raise PeerError("it came again")
            threading.Thread(target=self._read, args=(machine,), name="rank-machine", daemon=True).start()
            log.warning("%s of %s joined", _named(ranks), host)
        finally:
            with self._changed:
                self._guests = [one for one in self._guests if one is not guest]
                self._changed.notify_all()

    def _refuse(self, connection: Connection, why: str, wait: bool = False) -> None:
        tell(connection, {"refused": why, "wait": wait})
        raise PeerError(why)

    def _why_no_room(self, count: int) -> str:
        far = self._layout.ranks - self.here
        if count > far:
            return f"this machine offers {count} ranks and the engine wants {far} of other machines; offer fewer"
        return f"the engine has no {count} ranks in a row to give at the moment"

    def _forget_guest(self, name: str) -> None:
        """It has come again, so nobody is behind the connection on which it was about to join."""
        with self._changed:
            gone = [one for one in self._guests if one.name == name]
            self._guests = [one for one in self._guests if one not in gone]
        for one in gone:
            one.connection.hang_up()

    def _reserve(self, name: str, count: int, had: object, connection: Connection) -> _Guest | None:
        """Ranks that nobody has, those that it had before if it can be."""
        with self._changed:
            taken = {rank for one in self._machines.values() for rank in one.ranks}
            taken |= {rank for one in self._guests for rank in one.ranks}
            runs = [range(first, first + count) for first in range(self.here, self._layout.ranks - count + 1)]
            free = [run for run in runs if not taken & set(run)] if count > 0 and not self._closed else []
            for run in sorted(free, key=lambda run: run.start != had):
                guest = _Guest(name, run, connection)
                self._guests.append(guest)
                return guest
        return None

    # In the thread of one that is there

    def _read(self, machine: _Machine) -> None:
        while (said := machine.line.next()) is not None:
            try:
                if isinstance(said, tuple):
                    raise ValueError("it sends steps")
                self._hear(machine, said)
            except (ValueError, KeyError, TypeError) as error:
                machine.line.end(f"it says something that is not known here: {error}")
        self._drop(machine, machine.line.why)

    def _hear(self, machine: _Machine, said: Order) -> None:
        rank = int(said["rank"])
        if rank not in machine.ranks:
            raise ValueError(f"rank {rank} is not its own")
        generation, told = self._told or (0, None)
        if "done" in said or "fail" in said:
            if told is not None and said["generation"] == generation:
                if "done" in said:
                    told.done(rank, int(said["done"]))
                else:
                    told.fail(rank, int(said["step"]), str(said["fail"]))
        elif "lost" not in said or said["generation"] == generation:
            self.tells(rank, said)

    def _drop(self, machine: _Machine, why: str) -> None:
        with self._changed:
            known = self._machines.get(machine.ranks.start) is machine
            if known:
                del self._machines[machine.ranks.start]
            self._changed.notify_all()
        machine.line.end(why)
        if known:
            if not self._closed:
                log.warning("%s of %s left: %s", _named(machine.ranks), machine.host, why)
            for rank in machine.ranks:
                self.tells(rank, {"lost": f"rank {rank} is gone with its machine, {machine.host}: {why}"})


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
