"""Ranks that are processes: what they exchange through shared memory, what ends them, and what they leave behind."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_processes import Ranks, ranks
from verb_calls import Call, any_calls, counted, make, random_call, same_bits

from tokenmill.errors import ConfigError, PeerLostError
from tokenmill.ops.native import elementwise, library
from tokenmill.ops.native.recording import RecordedGraph
from tokenmill.parallel.segment import Segment
from tokenmill.parallel.shared_memory import SharedMemoryCommunicator

NATIVE = not isinstance(library.load(), str)
ENDS = [True, False] if NATIVE else [False]  # the native library's, and plain torch's
SMALL = 4096  # bytes of slots and rings: most tensors go in several pieces

needs_native = pytest.mark.skipif(not NATIVE, reason="there is no native library")


@pytest.fixture(scope="module")
def group() -> Iterator[Ranks]:
    with ranks(4) as started:
        yield started


def segment(size: int, tmp_path: Path | None = None, **sizes: int) -> Segment:
    return Segment.create([range(size)], folder=tmp_path, **{"slot_bytes": SMALL, "ring_bytes": SMALL, **sizes})


def make_all(rank: int, name: str, native: list[bool], calls: list[Call]) -> tuple[Any, Any]:
    c = SharedMemoryCommunicator(Segment.open(name, rank), rank, native=native[rank])
    for number, call in enumerate(calls):
        got, expected = make(c, call)
        if got is not None and expected is not None:
            assert same_bits(got, expected), f"call {number} of {calls}"
    return dict(c.counts), dict(c.bytes)


EMPTY_FIRST = [("all_gather", 0, (0, 1), torch.bool), ("all_to_all", 1, (3, 700), torch.float32)]


@settings(max_examples=100, deadline=None)
@example(size=2, native=ENDS + ENDS[::-1] if NATIVE else ENDS * 4, calls=EMPTY_FIRST)  # what is empty is no handshake
@given(size=st.integers(1, 4), native=st.lists(st.sampled_from(ENDS), min_size=4, max_size=4), calls=any_calls)
def test_verbs_bring_what_torch_computes_bit_for_bit(
    group: Ranks, size: int, native: list[bool], calls: list[Call]
) -> None:
    """Of all shapes and types, in one piece and in many, by native ranks and others together; and all is counted."""
    if size == 1:
        calls = [call for call in calls if call[0] != "ring"]
    shared = segment(size)
    assert group.run(size, make_all, shared.name, native, calls) == [counted(size, calls)] * size
    assert not Path(shared.name).exists()


def make_many(rank: int, name: str, native: bool, calls: int) -> int:
    c = SharedMemoryCommunicator(Segment.open(name, rank), rank, native=native)
    chance, mine = random.Random(1), random.Random(rank)  # the same calls, at a pace of one's own
    for _ in range(calls):
        got, expected = make(c, random_call(chance))
        if got is not None and expected is not None:
            assert same_bits(got, expected)
        if mine.random() < 0.02:
            time.sleep(mine.random() / 500)
    return int(c.counts.total())


@pytest.mark.parametrize("native", ENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_thousands_of_calls_back_to_back(group: Ranks, native: bool, size: int) -> None:
    calls = 4000 if native else 400
    shared = segment(size)
    assert min(group.run(size, make_many, shared.name, native, calls)) >= calls


def call_until_lost(rank: int, name: str, native: bool, verb: str) -> bool:
    try:
        shared = Segment.open(name, rank)
    except PeerLostError:  # the group ended before this rank came
        return True
    c = SharedMemoryCommunicator(shared, rank, native=native)
    chance = random.Random(1)
    try:
        while True:
            if verb == "any":
                make(c, random_call(chance))
            elif verb == "send":
                c.send(torch.zeros(SMALL), (rank + 1) % c.size)  # nobody receives
            else:
                c.receive(torch.zeros(1), (rank + 1) % c.size)
    except PeerLostError:
        for later in (lambda: c.all_reduce(torch.zeros(2)), c.barrier, lambda: c.send(torch.zeros(1), rank)):
            with pytest.raises(PeerLostError):
                later()
        return True


@pytest.mark.parametrize("native", ENDS)
@pytest.mark.parametrize("verb", ["any", "any", "any", "send", "receive"])
def test_an_abort_at_any_moment_ends_all_calls(group: Ranks, native: bool, verb: str) -> None:
    shared = segment(3)
    group.begin(range(3), call_until_lost, shared.name, native, verb)
    time.sleep(random.random() / 20)
    shared.abort()
    lost = [group.answer(rank) for rank in range(3)]
    assert lost == [True] * 3 and not Path(shared.name).exists()


def wait_for_all(rank: int, name: str) -> None:
    SharedMemoryCommunicator(Segment.open(name, rank), rank).barrier()


@pytest.mark.parametrize("native", ENDS)
@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_leaves_nobody_waiting_once_the_group_is_ended(group: Ranks, native: bool, killed: int) -> None:
    shared = segment(3)
    group.begin(range(3), call_until_lost, shared.name, native, "any")
    time.sleep(random.random() / 20)
    group.kill(killed)
    shared.abort()
    assert all(group.answer(rank) for rank in range(3) if rank != killed)
    again = segment(3)
    group.run(3, wait_for_all, again.name)  # the next generation, with another in its place


def talk_in_groups(rank: int, name: str, native: bool) -> tuple[list[int], list[int], int]:
    shared = Segment.open(name, rank)
    world = SharedMemoryCommunicator(shared, rank, native=native)
    pair = SharedMemoryCommunicator(shared, rank, 1 + rank // 2, native=native)
    assert (pair.rank, pair.size) == (rank % 2, 2)
    if rank < 2:
        world.send(torch.tensor([rank + 10]), rank + 2)
        received = -1
    else:
        received = int(world.receive(torch.tensor([0]), rank - 2))
    own = torch.tensor([rank])
    return pair.all_gather(own).flatten().tolist(), world.all_gather(own).flatten().tolist(), received


@pytest.mark.parametrize("native", ENDS)
def test_one_segment_serves_several_groups(group: Ranks, native: bool) -> None:
    """As two stages of two shards have them."""
    shared = Segment.create([range(4), (0, 1), (2, 3)], slot_bytes=SMALL, ring_bytes=SMALL)
    everybody = [0, 1, 2, 3]
    assert group.run(4, talk_in_groups, shared.name, native) == [
        ([0, 1], everybody, -1),
        ([0, 1], everybody, -1),
        ([2, 3], everybody, 10),
        ([2, 3], everybody, 11),
    ]


class Recorded:
    """A step of two sums with something between them, which a graph has for up to 6 rows."""

    def __init__(self, c: SharedMemoryCommunicator, width: int) -> None:
        self.c, self.x = c, torch.zeros(6, width)
        self.graph = RecordedGraph(6)
        with self.graph.record():
            self.out, self.all = self.compute(self.x)

    def compute(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.c.all_reduce(elementwise.scaled(x, 2.0))
        y = self.c.all_reduce(elementwise.add(y, x))
        return y, self.c.all_gather(y)

    def replay(self, seed: int, rows: int) -> None:
        self.x.normal_(generator=torch.Generator().manual_seed(10 * seed + self.c.rank))
        self.graph.run(rows)
        y, gathered = self.compute(self.x[:rows].clone())
        assert same_bits(self.out[:rows], y) and same_bits(self.all[:, :rows].contiguous(), gathered)


def replay_graphs(rank: int, name: str, threads: int, width: int) -> dict[str, int]:
    library.library().threads = threads
    recorded = Recorded(SharedMemoryCommunicator(Segment.open(name, rank), rank), width)
    assert not recorded.c.counts  # recording is not calling
    for turn in range(25):
        recorded.replay(turn, 1 + turn % 6)
    return dict(recorded.c.counts)


@needs_native
@pytest.mark.parametrize("size, threads", [(2, 1), (2, 2), (3, 2)])
def test_recorded_steps_exchange_for_any_number_of_rows(group: Ranks, size: int, threads: int) -> None:
    """A graph computes what its ops compute one by one, with one thread and more; every replay is counted."""
    for width in (16, 1000):
        shared = segment(size)
        found = group.run(size, replay_graphs, shared.name, threads, width)
        assert found == [{"all_reduce": 100, "all_gather": 50}] * size


def replay_until_lost(rank: int, name: str, threads: int) -> bool:
    library.library().threads = threads
    try:
        shared = Segment.open(name, rank)
    except PeerLostError:  # the group ended before this rank came
        return True
    recorded = Recorded(SharedMemoryCommunicator(shared, rank), 1000)
    with pytest.raises(PeerLostError):
        while True:
            recorded.graph.run(5)
    with pytest.raises(PeerLostError):
        recorded.graph.run(1)
    return True


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_a_recorded_step_ends_with_its_group(group: Ranks, threads: int) -> None:
    shared = segment(2)
    group.begin(range(2), replay_until_lost, shared.name, threads)
    time.sleep(random.random() / 10)
    shared.abort()
    assert [group.answer(rank) for rank in range(2)] == [True, True]


def test_only_the_user_can_open_a_segment_and_only_until_all_ranks_have_it(tmp_path: Path) -> None:
    shared = segment(2, tmp_path)
    found = os.stat(shared.name)
    assert stat.S_IMODE(found.st_mode) == 0o600
    shared.enter(0)
    assert Path(shared.name).exists()
    Segment.open(shared.name, 1)
    assert not Path(shared.name).exists()
    with pytest.raises(PeerLostError, match="before it came"):
        Segment.open(shared.name, 1)


def test_what_is_no_segment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 8192)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="not a segment of this user"):
        Segment.open(str(file), 0)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="use one version for all ranks"):
        Segment.open(str(file), 0)


def test_a_segment_goes_with_its_maker(tmp_path: Path) -> None:
    """However that ends: a killed one's is removed when the next is made; those of the living stay."""
    child = os.fork()
    if child == 0:
        kept = segment(2, tmp_path)  # noqa: F841
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (orphan,) = tmp_path.iterdir()
    living = segment(2, tmp_path)
    assert not orphan.exists() and Path(living.name).exists()
    other = segment(2, tmp_path)
    name = living.name
    assert Path(name).exists()
    del living
    assert not Path(name).exists()
    other.abort()
    assert other.ended and not list(tmp_path.iterdir())


def test_too_little_memory_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ConfigError, match=r"no room for the \d+ MiB .* 2 ranks .*--shm-size"):
        Segment.create([range(2)], folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("native", ENDS)
def test_parts_for_another_number_of_ranks_are_refused(native: bool, tmp_path: Path) -> None:
    c = SharedMemoryCommunicator(segment(1, tmp_path), 0, native=native)
    with pytest.raises(ValueError, match="2 parts for 1 ranks"):
        c.all_to_all(torch.zeros(2, 3))


def test_a_segment_without_a_name_is_had_from_its_open_file_until_it_is_forgotten(tmp_path: Path) -> None:
    segment = Segment.create([range(2)], folder=tmp_path)
    file = segment.unname()
    assert not list(tmp_path.iterdir())
    for rank in range(2):
        theirs = Segment.open(os.dup(file), rank)
        assert theirs.groups == segment.groups
    segment.area(0).slots[1, 0, 0] = 77
    assert theirs.area(0).slots[1, 0, 0] == 77
    segment.abort()
    with pytest.raises(PeerLostError):
        Segment.open(os.dup(file), 1)
    segment.forget()
    with pytest.raises(OSError):
        os.fstat(file)
