"""Compressed sums over ranks: how far from exact, who gets what, and how many bytes travel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.parallel.compressed import BOUND, GROUP, CompressedSums, compressed_all_reduce
from tokenmill.parallel.sums import sum_by_pairs
from tokenmill.parallel.threads import ThreadCommunicator, thread_communicators


def on_all(size: int, rank_does: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [
            answer.result(timeout=120) for answer in [pool.submit(rank_does, c) for c in thread_communicators(size)]
        ]


def largest(x: torch.Tensor) -> torch.Tensor:  # [rows, dim]: of each element, the largest magnitude in its group
    groups = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % GROUP)).view(x.shape[0], -1, GROUP)
    return groups.amax(-1).repeat_interleave(GROUP, -1)[:, : x.shape[1]]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 4),
    rows=st.integers(1, 5),
    dim=st.integers(1, 400),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    opposite=st.booleans(),
)
def test_sums_are_within_their_bound_and_the_same_for_all(
    size: int, rows: int, dim: int, seed: int, spread: float, opposite: bool
) -> None:
    """Of parts with outliers, too, and of parts that nearly cancel."""
    random = torch.Generator().manual_seed(seed)
    parts = [torch.randn(rows, dim, generator=random) for _ in range(size)]
    parts = [x * (spread * torch.randn(rows, dim, generator=random)).exp() for x in parts]
    if opposite:
        parts[1] = -parts[0] * (1 + 1e-3 * parts[1].tanh())
    found = on_all(size, lambda c: compressed_all_reduce(c, parts[c.rank].clone()))
    exact = sum_by_pairs([x.double() for x in parts])
    bound = BOUND * sum_by_pairs([largest(x).double() for x in parts])
    assert ((found[0].double() - exact).abs() <= bound).all()
    assert all(torch.equal(found[0], x) for x in found)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    parts = [torch.randn(6, 300) for _ in range(3)]
    together = on_all(3, lambda c: compressed_all_reduce(c, parts[c.rank].clone()))[0]
    for row in range(6):
        alone = on_all(3, lambda c, row=row: compressed_all_reduce(c, parts[c.rank][row : row + 1].clone()))[0]
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so_and_in_its_group(bad: float) -> None:
    def rank_does(c: ThreadCommunicator) -> torch.Tensor:
        x = torch.ones(2, 2 * GROUP)
        if c.rank == 1:
            x[1, 3] = bad
        return compressed_all_reduce(c, x)

    for found in on_all(2, rank_does):
        assert not found[1, 3].isfinite()
        assert torch.equal(found[0], torch.full((2 * GROUP,), 2.0)) and found[1, GROUP:].eq(2).all()


def test_only_large_sums_are_compressed_and_a_quarter_of_their_bytes_travels() -> None:
    def rank_does(c: ThreadCommunicator) -> tuple[Any, Any, torch.Tensor]:
        sums = CompressedSums(c, least_bytes=64 * 1024 * 4)
        small = sums.all_reduce(torch.full((63, 1024), 0.1))
        large = sums.all_reduce(torch.full((64, 1024), 0.1, dtype=torch.float64))
        sums.all_reduce(torch.ones(64, 1024, dtype=torch.int64))
        assert large.dtype == torch.float64 and large.shape == (64, 1024)
        return dict(sums.counts), dict(sums.bytes), small

    codes = 64 * 1024 * (GROUP + 4) // GROUP
    for counts, sizes, small in on_all(2, rank_does):
        assert counts == {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
        assert sizes["all_to_all"] == codes and sizes["all_gather"] == codes // 2
        assert torch.equal(small, torch.full((63, 1024), 0.1) + torch.full((63, 1024), 0.1))
