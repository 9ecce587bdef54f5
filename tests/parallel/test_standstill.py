"""Ranks that hang are told from those that compute, and from those that wait for others."""

from __future__ import annotations

from tokenmill.engine.ranks.standstill import Standstill

PATIENCE, BUSY = 45.0, 600.0


def hung_after(shares: dict[int, float], most: int = 1000, rank_gets_on_every: int = 10**9) -> int | None:
    """The second in which ranks that take these shares of a core are said to hang; None: they are not."""
    standstill = Standstill(PATIENCE, BUSY)
    for second in range(most):
        ticks = {rank: int(share * second * 100) / 100 for rank, share in shares.items()}  # as the system counts them
        if standstill.look(second // rank_gets_on_every, 1.0, ticks):
            return second
    return None


def test_a_rank_that_computes_nothing_hangs_though_others_look_whether_it_is_back() -> None:
    assert hung_after({1: 0.0}) == PATIENCE
    assert hung_after({1: 0.0, 2: 0.003, 3: 0.03}) == PATIENCE, "who waits takes a little time, now and then"


def test_as_long_as_any_computes_there_is_more_patience() -> None:
    assert hung_after({1: 0.0, 2: 0.9}) == BUSY
    assert hung_after({0: 1.0, 1: 0.003}) == BUSY, "ranks may wait for rank 0"


def test_ranks_that_get_on_do_not_hang_however_little_they_compute() -> None:
    assert hung_after({1: 0.0, 2: 0.0}, rank_gets_on_every=40) is None


def test_what_cannot_be_known_counts_as_computing() -> None:
    standstill = Standstill(PATIENCE, BUSY)
    hung = [standstill.look(0, 1.0, {1: None}) for _ in range(601)]
    assert hung.index(True) == BUSY
