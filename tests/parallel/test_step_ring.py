"""Every reader of a ring gets every message, in order, whatever its size and whoever is slow."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine.ranks.board import Board
from tokenmill.engine.ranks.shared_words import SharedMemory
from tokenmill.engine.ranks.step_ring import RingBehindError, RingReader, RingWriter, TornMessageError, ring_bytes

READERS, SLOTS, SLOT_BYTES = 3, 4, 64


def ring(offset: int = 0) -> tuple[SharedMemory, RingWriter, list[RingReader]]:
    memory = SharedMemory.of_size(offset + ring_bytes(READERS, SLOTS, SLOT_BYTES))
    there = SharedMemory(memory.fd)  # as another process maps it
    writer = RingWriter(memory, offset, READERS, SLOTS, SLOT_BYTES)
    return memory, writer, [RingReader(there, offset, READERS, one, SLOTS, SLOT_BYTES) for one in range(READERS)]


def nothing() -> None: ...


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=5 * SLOT_BYTES), max_size=30), st.integers(0, 2**32))
def test_all_readers_get_all_messages_in_order(messages: list[bytes], seed: int) -> None:
    memory, writer, readers = ring()
    heard: list[list[bytes]] = [[] for _ in readers]
    finished = threading.Event()

    def listen(reader: int) -> None:
        rng = random.Random(seed + reader)
        while (message := readers[reader].receive(finished.is_set)) is not None:
            heard[reader].append(message)
            if rng.random() < 0.1:
                time.sleep(0.001)  # and the writer has to wait

    threads = [threading.Thread(target=listen, args=(reader,)) for reader in range(READERS)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.send(message, 30, nothing)
    finished.set()
    writer.wake()
    for thread in threads:
        thread.join()
    assert heard == [messages] * READERS
    memory.close()


def test_a_reader_that_is_behind_holds_the_writer_up_until_its_patience_ends() -> None:
    _, writer, readers = ring()
    for number in range(SLOTS):
        writer.send(bytes([number]), 0, nothing)
    looks: list[int] = []
    with pytest.raises(RingBehindError):
        writer.send(b"one too many", 0.01, lambda: looks.append(1))
    assert looks
    for reader in readers:
        assert reader.receive(lambda: True) == b"\x00"
    writer.send(b"now there is room", 0, nothing)


def test_what_the_check_raises_ends_the_wait_for_room() -> None:
    _, writer, _ = ring()
    for number in range(SLOTS):
        writer.send(bytes([number]), 0, nothing)

    def lost() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        writer.send(b"for nobody", 1e9, lost)


def test_a_reader_that_waits_is_told_that_nothing_more_comes() -> None:
    _, writer, readers = ring()
    ended = threading.Event()
    heard: list[bytes | None] = []
    thread = threading.Thread(target=lambda: heard.append(readers[0].receive(ended.is_set)))
    thread.start()
    time.sleep(0.02)
    ended.set()
    writer.wake()
    thread.join(10)
    assert heard == [None]


def test_a_message_that_is_not_what_was_written_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, writer, readers = ring(64)
    monkeypatch.setattr("tokenmill.engine.ranks.step_ring.NAP", 0)
    writer.send(b"all of it", 0, nothing)
    at = memory.bytes.find(b"all of it")
    memory.bytes[at] ^= 1
    with pytest.raises(TornMessageError):
        readers[0].receive(lambda: True)


def test_a_board_tells_how_far_ranks_are_and_why_one_failed() -> None:
    board = Board.of_ranks(range(1, 4))
    there = Board(board.memory, range(1, 4))
    assert [board.done(rank) for rank in (1, 2, 3)] == [0, 0, 0] and board.failure is None and not board.ended
    for rank in (1, 3):
        there.set_done(rank, 7)
    late = threading.Timer(0.02, there.set_done, (2, 7))
    late.start()
    board.wait_done(7, nothing)
    assert board.done(2) == 7
    there.fail(3, 8, "ü" * 5000)
    there.end()
    assert board.ended and board.failure is not None
    rank, why = board.failure
    assert rank == 3 and why.startswith("üü")
    late.join()


def test_who_waits_for_a_rank_is_told_of_the_end() -> None:
    board = Board.of_ranks(range(1, 2))

    def check() -> None:
        if board.ended:
            raise ConnectionError

    threading.Timer(0.02, board.end).start()
    with pytest.raises(ConnectionError):
        board.wait_done(1, check)
