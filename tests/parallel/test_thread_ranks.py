"""Ranks as threads: what every communicator promises, held by the plainest one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tokenmill.parallel.communicator import Communicator, PeerLostError
from tokenmill.parallel.threads import ThreadCommunicator, thread_communicators


def on_all(size: int, rank_does: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [
            answer.result(timeout=120) for answer in [pool.submit(rank_does, c) for c in thread_communicators(size)]
        ]


def part(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_verbs_bring_what_their_names_say(size: int) -> None:
    def rank_does(c: Communicator) -> tuple[torch.Tensor, ...]:
        x = part(c.rank, (size, 3))
        c.send(x + 1, (c.rank + 1) % size)
        received = c.receive(x, (c.rank - 1) % size)
        c.barrier()
        return received, c.all_gather(x), c.all_to_all(x), c.all_reduce(x)

    parts = [part(rank, (size, 3)) for rank in range(size)]
    total = {
        1: lambda p: p[0],
        2: lambda p: p[0] + p[1],
        3: lambda p: (p[0] + p[1]) + p[2],
        4: lambda p: (p[0] + p[1]) + (p[2] + p[3]),
    }[size](parts)
    for rank, (received, gathered, turned, summed) in enumerate(on_all(size, rank_does)):
        assert torch.equal(received, parts[(rank - 1) % size] + 1)
        assert torch.equal(gathered, torch.stack(parts))
        assert torch.equal(turned, torch.stack([p[rank] for p in parts]))
        assert torch.equal(summed, total)


def test_calls_and_bytes_are_counted_by_verb() -> None:
    def rank_does(c: Communicator) -> tuple[dict[str, int], dict[str, int]]:
        c.all_reduce(torch.zeros(5))
        c.all_reduce(torch.zeros(3, dtype=torch.bfloat16))
        c.all_gather(torch.zeros(2, dtype=torch.int64))
        return dict(c.counts), dict(c.bytes)

    assert on_all(2, rank_does) == [({"all_reduce": 2, "all_gather": 1}, {"all_reduce": 26, "all_gather": 16})] * 2


def test_an_abort_ends_waiting_and_later_calls() -> None:
    def rank_does(c: ThreadCommunicator) -> None:
        if c.rank == 2:
            return c.abort()
        for _ in range(2):
            with pytest.raises(PeerLostError):
                c.receive(torch.zeros(1), 2) if c.rank else c.all_reduce(torch.zeros(1))

    on_all(3, rank_does)


def test_ranks_that_disagree_are_told_so() -> None:
    def rank_does(c: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match="disagree"):
            c.all_reduce(torch.zeros(2 + c.rank))

    on_all(2, rank_does)
