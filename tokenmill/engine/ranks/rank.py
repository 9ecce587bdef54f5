"""What a rank's process does: it loads its part of the model, and launches the steps that rank 0 tells."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import threading
import time
import traceback
from typing import Any

from tokenmill.collector import collector_paused
from tokenmill.config import EngineConfig
from tokenmill.engine.rank_model import RankModel, rank_model, settings_from
from tokenmill.engine.ranks.adapter_codec import decode_adapter, is_adapter
from tokenmill.engine.ranks.board import Board
from tokenmill.engine.ranks.links import channels_of
from tokenmill.engine.ranks.meeting import Meeting
from tokenmill.engine.ranks.orders import Order, receive_order, send_order
from tokenmill.engine.ranks.shared_kv import part_of
from tokenmill.engine.ranks.shared_words import SharedMemory
from tokenmill.engine.ranks.step_codec import decode_step
from tokenmill.engine.step import Runner
from tokenmill.errors import TokenmillError
from tokenmill.model.adapters.slots import AdapterSlots
from tokenmill.parallel.communicator import PeerLostError
from tokenmill.parallel.layout import parse_layout

TELL_EVERY = 0.1  # seconds, at least, between two words of how far loading is


class Link:
    """A rank's end of its socket. When the engine is gone the process ends at once, whatever it is doing."""

    def __init__(self, engine: socket.socket) -> None:
        self._engine = engine
        self._orders: queue.SimpleQueue[tuple[Order, list[int]]] = queue.SimpleQueue()
        self._told, self._what = 0.0, ""
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def next(self) -> tuple[Order, list[int]]:
        return self._orders.get()

    def tell(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # nobody hears it any more
            send_order(self._engine, order)

    def progress(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if what != self._what or now - self._told >= TELL_EVERY or 0 < total <= done:
            self._told, self._what = now, what
            self.tell({"progress": [done, total, what]})

    def _read(self) -> None:
        while (order := receive_order(self._engine)) is not None:
            self._orders.put(order)
        os._exit(0)


def serve(engine: socket.socket) -> None:
    """Take part in one generation after the other. The model is loaded once, for the first."""
    link = Link(engine)
    model: RankModel | None = None
    while True:
        order, files = link.next()
        rank, ranks = order["rank"], order["ranks"]
        layout = parse_layout(order["config"]["parallel"])
        board = Board(SharedMemory(files[0]), range(*order["followers"]), range(*order["readers"]))
        ends = {
            other: (socket.socket(fileno=file), bytes.fromhex(key))
            for (other, key), file in zip(order["links"], files[2:], strict=False)
        }
        rest = files[2 + len(ends) :]
        kv_memory = part_of(rest[0], rank, ranks) if rest else None
        meeting: Meeting | None = None
        runner: Runner | None = None
        try:
            machine = range(*order["machine"])
            meeting = Meeting.join(files[1], layout, machine, rank)
            if len(machine) < ranks:
                meeting.connect(channels_of(rank, ends))
            if model is None:
                with collector_paused():
                    model = load(order, link)
                gc.freeze()
            runner = model.runner(meeting.communicator, meeting.every, kv_memory)
            link.tell({"ready": order["generation"]})
            try:
                follow(runner, board, rank, meeting, layout.coordinates(rank)[1], model.adapters)
            except PeerLostError as error:  # who was lost is told of by others; if it was only a connection, here
                link.tell({"broken": order["generation"], "why": str(error)})
        except Exception as error:
            if not isinstance(error, TokenmillError):
                traceback.print_exc()
            why = str(error).strip() or "no message"
            link.tell({"failed": type(error).__name__, "why": why, "generation": order["generation"]})
            if not isinstance(error, PeerLostError):  # whose generation has ended
                _end(board, rank, 1, error, meeting)
        finally:
            runner = kv_memory = None  # its memory is for the next one
            if meeting is not None:
                meeting.close()
            for end, _ in ends.values():  # which the meeting has closed, if it came to that
                end.close()
            board.memory.close()


def load(order: dict[str, Any], link: Link) -> RankModel:
    config = EngineConfig(**order["config"])
    return rank_model(config, order["rank"], settings_from(order["settings"]), link.progress, order["threads"])


def follow(
    runner: Runner, board: Board, rank: int, others: Meeting, group: int, slots: AdapterSlots | None = None
) -> None:
    """Launch what is told until the generation ends, or a step fails: nothing counts then before the next one. group:
    whose part of a step it reads, where steps have parts; slots: for the adapters that come between steps. Raises
    PeerLostError."""
    reader, number = board.reader(rank), 1
    while (message := reader.receive(lambda: board.ended)) is not None and not board.ended:
        try:
            if is_adapter(message):
                assert slots is not None
                slots.write(*decode_adapter(message))
                continue
            step = decode_step(message, group)
            number = step.number
            runner.launch(step)
        except PeerLostError:
            raise
        except Exception as error:
            _end(board, rank, number, error, others)
            return
        board.set_done(rank, step.number)


def _end(board: Board, rank: int, step: int, error: Exception, others: Meeting | None) -> None:
    """The generation ends for all, with this rank's reason."""
    lines = str(error).strip().splitlines()
    board.fail(rank, step, f"{type(error).__name__}: {lines[0] if lines else 'no message'}")
    board.end()
    if others is not None:
        others.abort()
