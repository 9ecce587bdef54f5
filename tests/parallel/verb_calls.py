"""Calls of communicators for tests: each verb with what it should bring, and what is counted of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st

from tokenmill.parallel.communicator import Communicator
from tokenmill.parallel.sums import sum_by_pairs

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def part(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)) * 30
    return made > 0 if dtype is torch.bool else made.to(dtype)


Call = tuple[str, int, tuple[int, ...], torch.dtype]  # verb, seed, shape, type


def make(c: Communicator, call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the verb brought, and what it should bring."""
    verb, seed, shape, dtype = call
    if verb == "barrier":
        return c.barrier(), None
    if verb == "all_to_all":
        shape = (c.size, *shape)
    parts = [part(rank, seed, shape, dtype) for rank in range(c.size)]
    own = parts[c.rank].clone()
    if verb == "ring":  # everybody sends to the next one
        before = (c.rank - 1) % c.size
        for turn in range(2):  # no two of them wait for each other: one of the ring receives first
            if turn == (c.rank == 0):
                c.send(own, (c.rank + 1) % c.size)
            else:
                received = c.receive(torch.empty(shape, dtype=dtype), before)
        return received, parts[before]
    if verb == "all_reduce":
        return c.all_reduce(own), sum_by_pairs(parts)
    if verb == "all_gather":
        return c.all_gather(own), torch.stack(parts)
    return c.all_to_all(own), torch.stack([one[c.rank] for one in parts])


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in (x, y)]
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(*flat)


def counted(size: int, calls: list[Call]) -> tuple[Any, Any]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for verb, _, shape, dtype in calls:
        elements = torch.Size(shape).numel() * dtype.itemsize * (size if verb == "all_to_all" else 1)
        for name in ("send", "receive") if verb == "ring" else (verb,):
            counts[name] += 1
            sizes[name] += 0 if verb == "barrier" else elements
    return dict(counts), dict(sizes)


shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple) | st.just((3, 700))
verbs = st.sampled_from(["all_reduce", "all_gather", "all_to_all", "barrier", "ring"])
any_calls = st.lists(st.tuples(verbs, st.integers(0, 9), shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8)


def random_call(chance: random.Random) -> Call:
    shape = (chance.randrange(1, 9), chance.choice([1, 17, 64, 300]))
    verb = chance.choice(["all_reduce"] * 4 + ["all_gather", "all_to_all", "barrier", "ring"])
    return verb, chance.randrange(10), shape, chance.choice([torch.float32, torch.float32, torch.bfloat16])
