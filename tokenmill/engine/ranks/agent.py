"""Agent: what `tokenmill rank` runs. It joins an engine on another machine, and has the ranks that it is given here."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.config import EngineConfig
from tokenmill.engine.checkpoints import Progress
from tokenmill.engine.identity import weights_fingerprint
from tokenmill.engine.ranks.board import Board
from tokenmill.engine.ranks.door import Address, Door, heard, reach, tell
from tokenmill.engine.ranks.line import PATIENCE, Line
from tokenmill.engine.ranks.links import close_links, linked, make_links
from tokenmill.engine.ranks.meeting import call_machine
from tokenmill.engine.ranks.orders import Order
from tokenmill.engine.ranks.processes import RankProcesses
from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.model.weights.source import resolve
from tokenmill.parallel.layout import parse_layout
from tokenmill.peers import Connection, PeerError
from tokenmill.plan.solve.hardware import cpu_hardware

log = logging.getLogger("tokenmill.ranks")

PAUSES = (0.2, 5.0)  # seconds until an engine that is not there is asked again: at first, and at most
MOST_STEPS = 4096  # that wait here, of an engine that waits for most of them to be done
BUSY_PATIENCE = 600.0  # seconds in which ranks have to make room for a step

_REFUSALS = ("does not know the secret", "of another version", "is no part of an engine")


@dataclass(frozen=True)
class Offer:
    """What this machine has for an engine."""

    ranks: int = 1
    model: str | None = None  # where the model is here; None: what the engine calls it
    threads: int = 1  # of each rank
    cache_dir: str | None = None
    listen: Address | None = None  # where ranks of further machines call; None: the address that the engine sees


class Agent:
    """Goes to the engine's door, again and again until it is told that there is no use. What ranks have loaded they
    keep meanwhile."""

    def __init__(
        self,
        engine: Address,
        secret: bytes,
        offer: Offer,
        say: Callable[[str], None],
        progress: Progress = lambda done, total, what: None,
        silence: float = PATIENCE,
    ) -> None:
        """say: what a person should know."""
        self._engine, self._secret, self._offer, self._say, self._progress = engine, secret, offer, say, progress
        self._silence = silence
        self._name = secrets.token_hex(8)
        self._door: Door | None = None
        self._had: int | None = None  # the first of the ranks that are loaded
        self._loaded: Order = {}  # what they were told to load
        self._model: Path | None = None
        self._processes: RankProcesses | None = None
        self._generation: _Generation | None = None
        self._line: Line | None = None
        self._closed = threading.Event()

    def run(self) -> None:
        """Until `close`. Raises ConfigError where the engine and this machine do not fit together."""
        where = f"{self._engine[0]}:{self._engine[1]}"
        pause, said = PAUSES[0], ""
        while not self._closed.is_set():
            try:
                line = self._join()
                pause, said = PAUSES[0], ""
                self._serve(line)
                why = f"the engine at {where} is gone ({line.why})"
            except PeerError as error:
                why = f"the engine at {where} cannot be joined: {error}"
                if any(one in str(error) for one in _REFUSALS):
                    raise ConfigError(why) from None
            except (OSError, KeyError, TypeError) as error:
                why = f"this machine could not join the engine at {where}: {type(error).__name__}: {error}"
            if why != said and not self._closed.is_set():
                said = why
                self._say(f"{why}; it is asked again until it takes this machine")
            self._closed.wait(pause)
            pause = min(2 * pause, PAUSES[1])

    def close(self) -> None:
        """Any thread may. Nothing of the ranks is left when this returns."""
        self._closed.set()
        if self._line is not None:
            self._line.end("it was ended here")
        if self._generation is not None:
            self._generation.end()
        if self._processes is not None:
            self._processes.close()
        if self._door is not None:
            self._door.close()

    def _join(self) -> Line:
        connection = reach(self._engine, self._secret)
        try:
            self._ask(connection)
            return self._enter(connection)
        except BaseException:
            connection.close()
            raise

    def _ask(self, connection: Connection) -> None:
        hardware, at = cpu_hardware(), self._offer.listen or (connection.here, 0)
        if self._door is not None and self._offer.listen is None and self._door.address[0] != at[0]:
            self._door.close()  # this machine has another address now
            self._door = None
        if self._door is None:
            try:
                self._door = Door(at, self._secret, None)
            except OSError as error:
                raise ConfigError(f"nobody can listen at {at[0]}:{at[1]}: {error}; choose another: --listen") from None
        asked = {"version": __version__, "name": self._name, "ranks": self._offer.ranks, "had": self._had}
        asked |= {"port": self._door.address[1], "memory": [hardware.total_bytes, hardware.free_bytes]}
        tell(connection, {"join": asked})

    def _enter(self, connection: Connection) -> Line:
        connection.be_patient()  # the engine may be about to start
        answer = heard(connection)
        if "refused" in answer:
            if answer.get("wait"):
                raise PeerError(str(answer["refused"]))
            raise ConfigError(f"the engine refuses this machine: {answer['refused']}")
        welcome = answer["welcome"]
        name = self._offer.model or str(welcome["model"])
        try:
            files = resolve(name, self._progress, self._offer.cache_dir)
            if weights_fingerprint(files) != welcome["fingerprint"]:
                raise ConfigError(
                    f"the engine computes with another model than what {name!r} is here ({files.path}); name its copy: "
                    "tokenmill rank --model"
                )
        except TokenmillError as error:
            tell(connection, {"refuses": str(error)})
            raise
        self._model = files.path
        tell(connection, {"here": True})
        self._line = line = Line(connection, self._silence, self._beat)
        first, count = int(welcome["first"]), self._offer.ranks
        ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
        self._say(f"this machine has {ranks} of the engine at {self._engine[0]}:{self._engine[1]}")
        return line

    def _serve(self, line: Line) -> None:
        try:
            while (said := line.next()) is not None:
                if isinstance(said, tuple):
                    if self._generation is not None:
                        self._generation.take(*said)
                elif "order" in said:
                    self._begin(line, said)
                elif "end" in said:
                    if self._generation is not None and self._generation.number == said["end"]:
                        self._generation.end()
                elif "bye" in said:
                    line.end(str(said["bye"]))
                elif "kill" in said and self._processes is not None:
                    self._processes.kill(int(said["kill"]))
        except (KeyError, TypeError, ValueError) as error:
            line.end(f"it says something that is not known here: {error}")
        except OSError as error:  # no memory for what ranks share, perhaps
            line.end(f"this machine cannot have its ranks now: {error}")
        finally:
            if self._generation is not None:
                self._generation.end()

    def _begin(self, line: Line, said: Order) -> None:
        if self._generation is not None:
            self._generation.end()
        order, ranks = said["order"], range(said["first"], said["first"] + said["count"])
        config = {**order["config"], "model": str(self._model), "cache_dir": self._offer.cache_dir}
        EngineConfig(**config)  # what is wrong is found before anything is started
        order = {**order, "config": config, "threads": self._offer.threads}
        loaded = {"config": config, "settings": order["settings"], "ranks": [ranks.start, ranks.stop]}
        if self._processes is not None and self._loaded != loaded:
            self._processes.close()
            self._processes = None
        if self._processes is None:
            self._processes = RankProcesses(order["ranks"], here=ranks, heard=self._tell_heard)
        self._loaded, self._had = loaded, ranks.start
        doors = {
            rank: (host or self._engine[0], port)
            for first, count, host, port in said["doors"]
            for rank in range(first, first + count)
        }
        assert self._door is not None
        self._generation = _Generation(
            line, self._processes, order, ranks, self._door, doors, self._engine, self._secret
        )

    def _tell_heard(self, rank: int, word: Order) -> None:
        line = self._line
        if line is not None:
            line.tell({**word, "rank": rank})

    def _beat(self) -> dict[str, Any]:
        processes = self._processes
        if processes is None:
            return {}
        return {str(rank): processes.computed(rank) for rank in processes.here if processes.is_known(rank)}


class _Generation:
    """One, as far as it is on this machine: what its ranks share, what they are told, and what is told of them."""

    def __init__(
        self,
        line: Line,
        processes: RankProcesses,
        order: Order,
        ranks: range,
        door: Door,
        doors: dict[int, Address],
        engine: Address,
        secret: bytes,
    ) -> None:
        self.number: int = order["generation"]
        self._line, self._processes, self._ranks = line, processes, ranks
        self._over = threading.Event()
        self._failing = threading.Lock()
        self._fail_told = False
        self._layout = parse_layout(order["config"]["parallel"])
        self._board = Board.of_ranks(ranks)
        self._segment, self._file = call_machine(self._layout, ranks)
        self._steps: queue.Queue[bytes | None] = queue.Queue(MOST_STEPS)
        machines = _machines(self._layout.ranks, doors, ranks)
        doors = {**doors, **dict.fromkeys(machines[0], engine)}
        self._starting = threading.Thread(
            target=self._start, args=(order, door, doors, machines, secret), name="rank-start", daemon=True
        )
        self._starting.start()
        threading.Thread(target=self._pass_on, name="rank-steps", daemon=True).start()
        for rank in ranks:
            threading.Thread(target=self._tell_done, args=(rank,), name=f"rank-done-{rank}", daemon=True).start()

    def take(self, generation: int, message: bytes) -> None:
        """A step. Raises ValueError where there are more than any engine has on its way."""
        if generation != self.number or self._over.is_set():
            return
        try:
            self._steps.put_nowait(message)
        except queue.Full:
            raise ValueError(f"{MOST_STEPS} steps wait here, and it sends more") from None

    def lose(self, rank: int, why: str = "") -> None:
        """Its process is gone; the next generation has another one."""
        if not self._over.is_set():
            why = why or self._processes.why_gone(rank)
            said = {"lost": why, "code": self._processes.code(rank), "generation": self.number, "rank": rank}
            self._line.tell(said)
        self.end()

    def broken(self, rank: int, why: str) -> None:
        """The engine is told what a rank says, and judges."""

    def end(self) -> None:
        """For all ranks here, wherever they wait."""
        if self._over.is_set():
            return
        self._over.set()
        self._board.end()
        self._segment.abort()

    def _start(self, order: Order, door: Door, doors: dict[int, Address], machines: list[range], secret: bytes) -> None:
        links = None
        try:
            door.forget(self.number)
            pairs = linked(self._layout, machines)
            links = make_links(self.number, pairs, self._ranks, door, doors, secret, self._over.is_set)
            if links is None:
                return
            for rank in self._ranks:
                self._processes.ensure(rank)
                ends = links[rank]
                files = [self._board.memory.fd, self._file, *(link.fileno() for link, _ in ends.values())]
                span = [self._ranks.start, self._ranks.stop]
                own = {"rank": rank, "machine": span, "followers": span, "readers": span}
                keys = [[other, key.hex()] for other, (_, key) in ends.items()]
                self._processes.order(rank, {**order, **own, "links": keys}, files, self)
        except PeerError as error:
            self._line.tell({"broken": self.number, "why": str(error), "rank": self._ranks.start})
        except OSError as error:
            why = f"its machine has no room for rank {self._ranks.start}: {error}"
            self._line.tell({"failed": "OSError", "why": why, "generation": self.number, "rank": self._ranks.start})
        except Exception as error:  # else the engine would wait for ranks that nobody starts
            log.exception("rank %d was not started", self._ranks.start)
            why = f"rank {self._ranks.start} was not started: {type(error).__name__}: {error}"
            self._line.tell({"broken": self.number, "why": why, "rank": self._ranks.start})
        finally:
            if links is not None:
                close_links(links)

    def _pass_on(self) -> None:
        """Steps, to the ring that the ranks here read."""

        def check() -> None:
            if self._over.is_set():
                raise InterruptedError

        writer = self._board.writer()
        try:
            while not self._over.is_set():
                try:
                    message = self._steps.get(timeout=0.5)
                except queue.Empty:
                    continue
                if message is not None:
                    writer.send(message, BUSY_PATIENCE, check)
        except InterruptedError:
            pass
        self._starting.join()
        writer.wake()
        self._segment.forget()
        self._board.memory.close()

    def _tell_done(self, rank: int) -> None:
        seen = 0
        while not self._over.is_set():
            now = self._board.wait_changed(rank, seen)
            if now != seen:
                seen = now
                self._line.tell({"done": now, "generation": self.number, "rank": rank})
            elif self._board.ended:
                self._tell_failure()
                self.end()

    def _tell_failure(self) -> None:
        """Whoever sees first that it has ended tells of the step that failed: it is over for the others then."""
        with self._failing:
            failure = None if self._fail_told else self._board.failure
            self._fail_told = True
            if failure is not None:
                rank, why = failure
                step = self._board.failed_step(rank)
                self._line.tell({"fail": why, "step": step, "generation": self.number, "rank": rank})


def _machines(ranks: int, doors: dict[int, Address], mine: range) -> list[range]:
    """The ranks of each machine: those that nobody else has are the engine's."""
    first = min([*doors, mine.start])
    found, at = [range(first)], first
    while at < ranks:
        if at in mine:
            found.append(mine)
        else:
            end = at
            while end < ranks and end not in mine and doors[end] == doors[at]:
                end += 1
            found.append(range(at, end))
        at = found[-1].stop
    return found
