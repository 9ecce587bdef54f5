"""RankGroup: a runner that is many. Rank 0 is in the engine's process and answers; the others launch the same steps.

Ranks form a generation: one board, one way to exchange tensors. When a rank is lost, or fails a step, the generation
ends for all of them, and nothing that was launched on it counts. `reset` forms the next one: whoever is left keeps its
weights, who is missing is forked anew, and keys and values begin empty.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tokenmill.engine.checkpoints import Progress
from tokenmill.engine.rank_model import RankRunner
from tokenmill.engine.ranks.adapter_codec import encode_adapter
from tokenmill.engine.ranks.board import Board
from tokenmill.engine.ranks.links import LinksOf, channels_of, close_links
from tokenmill.engine.ranks.machines import RanksAbsentError
from tokenmill.engine.ranks.meeting import Meeting
from tokenmill.engine.ranks.processes import RankProcesses
from tokenmill.engine.ranks.shared_kv import SharedKV
from tokenmill.engine.ranks.standstill import Standstill
from tokenmill.engine.ranks.step_codec import encode_step
from tokenmill.engine.runner.data_rank import DataRank
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.scheduler.isolation import RANK_CRASHED, RANK_KILLED, RANK_LOST_IDLE
from tokenmill.engine.step import Loss, Pending, Step, StepResult
from tokenmill.errors import StepFailed, TokenmillError
from tokenmill.model.adapters.peft import AdapterWeights
from tokenmill.model.adapters.slots import AdapterSlots
from tokenmill.model.experts import ExpertLoad
from tokenmill.parallel.communicator import Communicator, PeerLostError
from tokenmill.parallel.layout import Layout, parse_layout

log = logging.getLogger("tokenmill.ranks")

PATIENCE = 45.0  # seconds without a step done, of a rank that computes nothing either: it hangs
BUSY_PATIENCE = 600.0  # of one that computes
TRIES = 5  # at making one generation
LAST_WORDS = 1.0  # seconds in which it becomes known why a rank of another machine cannot be reached
FUTILE = 12  # generations in a row that end before they have done a single step: another one would not help

Make = Callable[[Communicator | None, Communicator | None, torch.Tensor | None], RankRunner]


class RanksLostError(TokenmillError):
    """The group cannot be formed again."""


class RankGroup:
    """Ranks 1, 2, ... of `processes`, and rank 0 here. `order` has what they load; `threads` is how many torch has in
    this process without a group."""

    def __init__(
        self,
        processes: RankProcesses,
        order: dict[str, Any],
        threads: int,
        patience: float = PATIENCE,
        shared_kv: SharedKV | None = None,  # where keys and values of all ranks lie; None: each has memory of its own
    ) -> None:
        self._processes, self._order, self._patience = processes, order, patience
        self._layout = parse_layout(order["config"]["parallel"])
        self.shared_kv = shared_kv
        self.slots: AdapterSlots | None = None  # rank 0's own
        self._machines = processes.machines  # that have the other ranks; None: all are here
        self._number = 0  # of the generation
        self._futile = 0  # generations that lost a rank since a step was done
        self._make: Make | None = None
        self._tell: Progress = lambda done, total, what: None
        self._runner: RankRunner | None = None
        self._end = weakref.finalize(self, _close, processes, threads)
        self._generation = self._begin()

    @property
    def runner(self) -> RankRunner:
        """Rank 0's own."""
        assert self._runner is not None
        return self._runner

    @property
    def expert_load(self) -> ExpertLoad | None:
        """As `TorchRunner.expert_load`, of all ranks; None also for stages, of which each knows its own layers."""
        return self._runner.expert_load if isinstance(self._runner, TorchRunner | DataRank) else None

    @property
    def size(self) -> int:
        return self._processes.ranks

    @property
    def pids(self) -> list[int]:
        """Of the processes of ranks 1, 2, ..., as far as they are known."""
        return [pid for rank in range(1, self.size) if (pid := self._processes.pid(rank)) is not None]

    def complete(self, make: Make, tell: Progress) -> None:
        """The first generation, which the others have begun to load for: make rank 0's runner, and wait for all."""
        self._make, self._tell = make, tell
        began, tries = time.monotonic(), 0
        patience = 0.0 if self._machines is None else self._machines.patience  # networks come back
        while True:
            try:
                self._complete()
                return
            except PeerLostError as error:
                tries += 1
                if tries >= TRIES and time.monotonic() - began >= patience:
                    raise RanksLostError(f"the ranks did not get ready in {tries} tries: {error}") from error
                log.warning("%s; ranks are started again", error)
                self._renew()

    def launch(self, step: Step) -> Pending:
        generation = self._generation
        generation.send(step)
        try:
            own = self.runner.launch(step)
            generation.launched = step.number
            return _GroupPending(self, generation, step.number, own)
        except PeerLostError as error:
            failure = generation.explain(error)
        except Exception as error:
            failure = error
        raise failure.with_traceback(None)  # whose frames would hold the runner's memory until after the next is made

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Into a slot of all ranks, behind the steps that they were told. Where that fails the generation ends, as the
        next step finds, and slots are empty."""
        generation = self._generation
        try:
            generation.send_adapter(slot, weights)
            assert self.slots is not None
            self.slots.write(slot, weights)
        except Exception as error:
            log.warning("an adapter did not reach all ranks: %s", error)
            generation.end()

    def reset(self) -> Loss | None:
        """Form the next generation. Raises RanksLostError when that cannot be done."""
        generation = self._generation
        if not generation.sent and not generation.board.ended:
            return None  # nothing was launched since the last time
        weight = generation.weight
        self._futile += generation.lost is not None  # a step that failed is its requests' affair
        if self._futile > FUTILE:
            cause = generation.cause()
            self.close()
            raise RanksLostError(
                f"the ranks were lost {self._futile} times in a row without a step done ({cause}); look "
                "for what ends these processes, such as the memory that a container may have"
            )
        log.warning("%s; the ranks form generation %d", generation.cause() or "a step failed", self._number + 1)
        began = time.monotonic()
        self._renew()
        assert self._make is not None
        self.complete(self._make, self._tell)
        log.warning("generation %d goes on after %.2f s", self._number, time.monotonic() - began)
        return Loss(weight)

    def close(self) -> None:
        self._generation.end()
        self._end()

    def step_done(self) -> None:
        """All ranks are done with one, so the generation was worth it."""
        self._futile = 0

    def _renew(self) -> None:
        self._generation.end()
        self._runner = None  # its memory is for the next one
        self._generation.close()
        self._generation = self._begin()

    def _begin(self) -> Generation:
        """Tell all ranks of a new generation. Those of other machines call the ranks here, so they are told first."""
        if self._machines is not None:
            try:
                self._machines.wait(self._tell)
            except RanksAbsentError as error:
                self._processes.close()
                raise RanksLostError(str(error)) from None
        self._number += 1
        generation = Generation(self._processes, self._patience, self._layout, self._number)
        ranks = range(1, self.size)
        order = {**self._order, "generation": self._number, "ranks": self.size}
        for rank in ranks:
            self._processes.ensure(rank)
        for rank in ranks[self._processes.near - 1 :]:
            self._processes.order(rank, {**order, "rank": rank}, [], generation)
        links: LinksOf = {}
        if self._machines is not None:
            links = self._machines.links(self._number, generation, lambda: generation.board.ended) or {}
            generation.meeting.connect(channels_of(0, links.get(0, {})))
        for rank in ranks[: self._processes.near - 1]:
            ends = links.pop(rank, {})
            files = [generation.board.memory.fd, generation.meeting.file, *(link.fileno() for link, _ in ends.values())]
            files += [self.shared_kv.memory.fd] if self.shared_kv is not None else []
            keys = [[other, key.hex()] for other, (_, key) in ends.items()]
            own = {"rank": rank, "machine": [0, self._processes.near], "followers": [1, self.size], "links": keys}
            own["readers"] = [1, self._processes.near]
            self._processes.order(rank, {**order, **own}, files, generation)
            close_links({rank: ends})
        return generation

    def _complete(self) -> None:
        assert self._make is not None
        generation = self._generation
        if generation.board.ended:
            raise generation.cause() or PeerLostError("a rank was lost")
        if self._runner is None:
            mine = None if self.shared_kv is None else self.shared_kv.part(0)
            self._runner = self._make(generation.meeting.communicator, generation.meeting.every, mine)
        self._processes.wait_ready(self._number, self._patience, self._tell, lambda: generation.board.ended)
        if generation.board.ended:
            raise generation.cause() or PeerLostError("a rank was lost")


def _close(processes: RankProcesses, threads: int) -> None:
    processes.close()
    torch.set_num_threads(threads)


class Generation:
    """What ranks share from one loss to the next."""

    def __init__(self, processes: RankProcesses, patience: float, layout: Layout, number: int) -> None:
        ranks, near = processes.ranks, processes.near
        self.board = Board.of_ranks(range(1, ranks), range(1, near))
        self.meeting = Meeting.call(layout, range(near))
        self.number = number
        self.sent = 0  # the newest step
        self.launched = 0  # the newest that rank 0 has launched
        self.lost: tuple[int, str] | None = None  # the first rank that is gone, and why if that is known
        self._was_idle = False  # when that was lost
        self._is_nobodys = False  # and whether requests have nothing to do with it
        self._writer = self.board.writer()
        self._processes, self._standstill = processes, Standstill(patience, BUSY_PATIENCE)
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def send(self, step: Step) -> None:
        self.check()
        self.sent = step.number
        self._send(encode_step(step))

    def send_adapter(self, slot: int, weights: AdapterWeights) -> None:
        self.check()
        self._send(encode_adapter(slot, weights))

    def _send(self, message: bytes) -> None:
        if self._processes.machines is not None:
            self._processes.machines.send_step(self.number, message)
        if self.board.readers:
            self._writer.send(message, BUSY_PATIENCE, self.check)

    def wait_done(self, step: int) -> None:
        """Until every rank has launched the step without a failure."""
        self.board.wait_done(step, self.check)

    def check(self) -> None:
        if self.board.ended:
            raise self.cause() or PeerLostError("the group of ranks has ended")

    def cause(self) -> Exception | None:
        """Why it ended, if it was for a rank other than the first."""
        if (failure := self.board.failure) is not None:
            return StepFailed(f"rank {failure[0]}: {failure[1]}")
        if self.lost is not None:
            return PeerLostError(self.lost[1] or self._processes.why_gone(self.lost[0]))
        return None

    def explain(self, error: PeerLostError) -> Exception:
        """Why rank 0 found another one gone: who knows it may say so a moment later."""
        until = time.monotonic() + LAST_WORDS
        while self.cause() is None and time.monotonic() < until and self._processes.machines is not None:
            time.sleep(0.005)
        if self.cause() is None and self._processes.machines is not None:
            self._is_nobodys = True
            self.lose(self._processes.near, str(error))  # some rank of another machine
        return self.cause() or error

    def lose(self, rank: int, why: str = "") -> None:
        """A rank is gone. Any thread may say so."""
        if self.lost is None and not self._over.is_set():
            self._was_idle = all(self.board.done(one) >= self.sent for one in self.board.followers)
            self.lost = rank, why
        self.end()

    def broken(self, rank: int, why: str) -> None:
        """A rank cannot reach another one. If nobody tells soon that this one is gone, the connection was all."""

        def lose() -> None:
            if self.lost is None:
                self._is_nobodys = True
                self.lose(rank, why)

        timer = threading.Timer(LAST_WORDS, lose)
        timer.daemon = True
        timer.start()

    def done(self, rank: int, step: int) -> None:
        """On another machine."""
        self.board.set_done(rank, step)

    def fail(self, rank: int, step: int, why: str) -> None:
        """On another machine."""
        self.board.fail(rank, step, why)
        self.end()

    @property
    def weight(self) -> float:
        """How much of a failure the end is of the requests in its steps."""
        if self.lost is None:
            return 1.0
        if self._was_idle:
            return RANK_LOST_IDLE
        rank, why = self.lost
        killed = self._is_nobodys or (not why and self._processes.was_killed(rank))
        return RANK_KILLED if killed else RANK_CRASHED

    def end(self) -> None:
        """For all ranks, wherever they wait."""
        self._over.set()
        self.board.end()
        self._writer.wake()
        with contextlib.suppress(Exception):
            self.meeting.abort()
        if self._processes.machines is not None:
            self._processes.machines.end(self.number)

    def close(self) -> None:
        self.meeting.close()
        self.board.memory.close()

    def _watch(self) -> None:
        """Have a rank that hangs be killed, which ends the generation. Time in which this process did not run itself
        proves nothing."""
        tick, ranks = min(self._standstill.patience / 10, 1.0), self.board.followers
        before = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            passed, before = now - before, now
            dones = [self.board.done(rank) for rank in ranks]
            behind = [rank for rank, done in zip(ranks, dones, strict=True) if done < self.sent]
            if not behind or passed > 2 * tick + 0.05:
                continue
            computed = {rank: self._processes.computed(rank) for rank in behind}
            if self.launched < self.sent:  # they may wait for rank 0
                computed[0] = time.process_time()
            if self._standstill.look((self.sent, dones), passed, computed):
                for rank in behind:
                    self._processes.kill(rank)
                seconds = self._standstill.seconds
                self.lose(behind[0], f"rank {behind[0]} hung: it finished no step for {seconds:.0f} s")


class _GroupPending:
    """Rank 0's answer counts when all ranks have launched the step."""

    def __init__(self, group: RankGroup, generation: Generation, number: int, own: Pending) -> None:
        self._group, self._generation, self._number, self._own = group, generation, number, own

    def wait(self) -> StepResult:
        try:
            result = self._own.wait()
        except PeerLostError as error:
            raise self._generation.explain(error) from None
        self._generation.wait_done(self._number)
        self._group.step_done()
        return result
