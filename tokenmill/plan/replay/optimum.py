"""The best that eviction can do on a block trace, knowing the future: evict what is needed last, leaves first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

NEVER = 1 << 60


def optimum(trace: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Leading blocks that each request finds. A request needs all its blocks in memory at once.

    Belady's rule. Whoever needs a block needs those before it, so a parent's next use is never later than that of its
    children: where uses are equally late the deeper one goes, and no block is ever kept that could not be reached.
    """
    next_uses, upcoming = [[0]] * len(trace), dict[int, int]()
    for number in range(len(trace) - 1, -1, -1):
        next_uses[number] = [upcoming.get(block, NEVER) for block in trace[number]]
        for block in trace[number]:
            upcoming[block] = number
    cached: dict[int, int] = {}  # block -> its next use
    heap: list[tuple[int, int, int]] = []  # latest use first, deepest first
    found = []
    for number, blocks in enumerate(trace):
        hits = next((at for at, block in enumerate(blocks) if block not in cached), len(blocks))
        if len(blocks) > capacity:  # it cannot run here
            found.append(0)
            continue
        found.append(hits)
        excess = len(cached) - hits + len(blocks) - capacity
        while excess > 0:
            use, _, block = heappop(heap)
            if cached.get(block) == -use and -use > number:  # else it was used since, or is needed right now
                del cached[block]
                excess -= 1
        for depth, (block, use) in enumerate(zip(blocks, next_uses[number])):
            cached[block] = use
            heappush(heap, (-use, -depth, block))
    return found
