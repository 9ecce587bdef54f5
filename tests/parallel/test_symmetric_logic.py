"""What ranks with GPUs do with symmetric memory, on stand-ins for it: threads, memory of the CPU, signals by hand."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from tokenmill.errors import PeerLostError
from tokenmill.parallel.sums import sum_by_pairs
from tokenmill.parallel.symmetric import ONE_SHOT_BYTES, SymmetricCommunicator


class Machine:
    """The GPUs: what each rank allocated, in order, and the signals between ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.together = threading.Barrier(size, timeout=120)
        self.changed = threading.Condition()
        self.signals: set[tuple[int, int, int, int]] = set()  # memory, channel, from, to
        self.buffers: list[dict[int, torch.Tensor]] = [{}, {}]
        self.ops: list[str] = []

    def of(self, x: torch.Tensor) -> tuple[dict[int, torch.Tensor], int]:
        """The buffers of all ranks, one of which this is the beginning of."""
        for buffers in self.buffers:
            for rank, buffer in buffers.items():
                if buffer.data_ptr() == x.data_ptr():
                    return buffers, rank
        raise AssertionError("this is no symmetric memory")

    def total(self, x: torch.Tensor) -> torch.Tensor:
        buffers, _ = self.of(x)
        self.together.wait()
        total = sum_by_pairs([buffers[rank][: x.nbytes].view(x.dtype) for rank in range(self.size)]).clone()
        self.together.wait()
        return total

    def one_shot(self, buffer: torch.Tensor, x: torch.Tensor, op: str, group: str, out: torch.Tensor) -> None:
        assert (op, group) == ("sum", "ranks") and x.nbytes <= ONE_SHOT_BYTES
        self.ops.append("one shot")
        buffer.copy_(x)
        out.copy_(self.total(buffer))

    def two_shot(self, buffer: torch.Tensor, op: str, group: str) -> None:
        assert (op, group) == ("sum", "ranks") and buffer.nbytes > ONE_SHOT_BYTES
        self.ops.append("two shots")
        buffer.copy_(self.total(buffer))


class Handle:
    def __init__(self, machine: Machine, number: int, rank: int) -> None:
        self.machine, self.number, self.rank = machine, number, rank

    def barrier(self, channel: int = 0) -> None:
        self.machine.together.wait()

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        whole = self.machine.buffers[self.number][rank].view(dtype)
        return whole[storage_offset : storage_offset + torch.Size(sizes).numel()].view(sizes)

    def put_signal(self, to: int, channel: int) -> None:
        self._change((self.number, channel, self.rank, to), True)

    def wait_signal(self, source: int, channel: int) -> None:
        self._change((self.number, channel, source, self.rank), False)

    def _change(self, signal: tuple[int, int, int, int], put: bool) -> None:
        signals = self.machine.signals
        with self.machine.changed:
            assert self.machine.changed.wait_for(lambda: (signal in signals) != put, timeout=120)
            (signals.add if put else signals.remove)(signal)
            self.machine.changed.notify_all()


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(request.param)

    def rendezvous(buffer: torch.Tensor, group: Any) -> Handle:
        rank = group.rank()
        number = 1 if rank in made.buffers[0] else 0
        made.buffers[number][rank] = buffer
        return Handle(made, number, rank)

    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(dist, "barrier", lambda group: made.together.wait())
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", made.one_shot, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", made.two_shot, raising=False)
    return made


def on_all(machine: Machine, rank_does: Any, **options: Any) -> list[Any]:
    def start(rank: int) -> Any:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: machine.size, group_name="ranks")
        return rank_does(SymmetricCommunicator(group, **options))

    with ThreadPoolExecutor(machine.size) as pool:
        return [answer.result(timeout=240) for answer in [pool.submit(start, rank) for rank in range(machine.size)]]


@pytest.mark.parametrize("machine", [1, 2, 3, 4], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("by_pairs", [True, False])
def test_verbs_bring_what_their_names_say(machine: Machine, dtype: torch.dtype, by_pairs: bool) -> None:
    """In one piece and in several, of sizes that torch's own sums take and that they do not."""
    size = machine.size
    shapes = [(size, 1), (size, 5, 7), (size, 64, 16), (size, 3000), (size, 0)]

    def part(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 50).to(dtype)

    def rank_does(c: SymmetricCommunicator) -> None:
        for shape in shapes:
            parts = [part(rank, shape) for rank in range(size)]
            own, before = parts[c.rank], (c.rank - 1) % size
            assert torch.equal(c.all_reduce(own.clone()), sum_by_pairs(parts))
            assert torch.equal(c.all_gather(own), torch.stack(parts))
            assert torch.equal(c.all_to_all(own), torch.stack([one[c.rank] for one in parts]))
            if size > 1:  # longer than the room for it: one of the ring receives first
                for step in range(2):
                    if step == (c.rank == 0):
                        c.send(own, (c.rank + 1) % size)
                    else:
                        assert torch.equal(c.receive(own, before), parts[before])
        assert c.counts["all_reduce"] == len(shapes)
        assert c.bytes["all_gather"] == sum(part(0, shape).nbytes for shape in shapes)

    on_all(machine, rank_does, capacity=8192, by_pairs=by_pairs)


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_small_sums_take_one_shot_and_larger_ones_two(machine: Machine) -> None:
    def rank_does(c: SymmetricCommunicator) -> None:
        for elements in (1 << 10, 1 << 18):
            assert c.all_reduce(torch.ones(elements)).eq(2).all()

    on_all(machine, rank_does)
    assert machine.ops == ["one shot"] * 2 + ["two shots"] * 2


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_nothing_is_launched_after_an_abort(machine: Machine) -> None:
    def rank_does(c: SymmetricCommunicator) -> None:
        c.abort()
        with pytest.raises(PeerLostError):
            c.all_reduce(torch.ones(4))

    on_all(machine, rank_does)


def test_torch_has_the_ops_as_they_are_called() -> None:
    schemas = {
        "one_shot_all_reduce_copy_out": ["symm_buffer", "local_input", "reduce_op", "group_name", "out"],
        "two_shot_all_reduce_": ["input", "reduce_op", "group_name"],
    }
    for name, arguments in schemas.items():
        schema = getattr(torch.ops.symm_mem, name).default._schema
        assert [argument.name for argument in schema.arguments] == arguments
