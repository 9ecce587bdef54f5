"""Replays block traces through the real KV manager and block pool, one request after the other."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tokenmill.kv.manager import KVManager


@dataclass(frozen=True)
class BlockTrace:
    """Requests as the identities of their full blocks, in the order in which they come.

    An identity stands for the block and all before it: equal ones have equal beginnings.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...] = ()  # blocks that are computed after the prompt; empty: not known
    block_size: int = 512

    def requests(self) -> list[tuple[int, ...]]:
        if not self.answers:
            return list(self.prompts)
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers)]


@dataclass(eq=False, slots=True)
class ReplayedRequest:
    """What the KV manager needs to know of a request."""

    tokens: Any  # only their number is asked for: a range
    prompt_len: int
    identities: list[bytes]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    pruned: int = 0
    salt: str = ""
    adapter_key: str = ""
    last_step: int = 0
    num_exact: int = sys.maxsize
    in_float32: bool = False
    failed_fetches: int = 0


@dataclass(frozen=True)
class Replayed:
    """Blocks of prompts that every request asked for and found, and what it took."""

    asked: tuple[int, ...]
    found: tuple[int, ...]
    evictions: int
    takeovers: int
    seconds: float

    def share(self, first: int = 0) -> float:
        """Of the prompt blocks of requests from this one on that were found."""
        return sum(self.found[first:]) / max(1, sum(self.asked[first:]))


def replay(trace: BlockTrace, num_blocks: int, eviction: str) -> Replayed:
    """Every request is admitted on what is cached, computed and released before the next one comes.

    A request takes one block beside its full ones, for the end of its tokens. Whoever does not fit finds nothing.
    """
    size = trace.block_size
    kv = KVManager(num_blocks, size, eviction=eviction)
    asked, found = [], []
    began = time.perf_counter()
    for number, prompt in enumerate(trace.prompts):
        answer = trace.answers[number] if trace.answers else ()
        blocks = len(prompt) + len(answer)
        asked.append(len(prompt))
        if blocks + 1 > num_blocks:
            found.append(0)
            continue
        names = [identity.to_bytes(16) for identity in prompt]
        request = ReplayedRequest(range(len(prompt) * size + 1), len(prompt) * size + 1, names)
        hits = kv.match(request)
        found.append(len(hits))
        kv.admit(request, hits)
        kv.grow(request, len(prompt) * size + 1)
        request.num_computed = len(prompt) * size
        kv.publish(request)
        if answer:
            request.identities += [identity.to_bytes(16) for identity in answer]
            request.tokens = range(blocks * size + 1)
            kv.grow(request, blocks * size + 1)
            request.num_computed = blocks * size
            kv.publish(request)
        kv.release(request, 0)
    seconds = time.perf_counter() - began
    kv.check_integrity([])
    takeovers = kv.eviction.stats.takeovers if kv.eviction is not None else 0
    return Replayed(tuple(asked), tuple(found), kv.stats.evicted_blocks, takeovers, seconds)
