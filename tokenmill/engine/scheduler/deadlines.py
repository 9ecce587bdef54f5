"""Deadlines: whose time is up, without a look at anybody else."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tokenmill.engine.request import Request


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # the number breaks ties
        self._added = 0

    def add(self, request: Request, alive: int) -> None:
        """alive: how many requests there are, of which at least one has a deadline."""
        if request.deadline is None:
            return
        self._added += 1
        heapq.heappush(self._heap, (request.deadline, self._added, request))
        if len(self._heap) > 64 + 2 * alive:  # most of them ended long before their deadline
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> Iterator[Request]:
        while self._heap and self._heap[0][0] < now:
            request = heapq.heappop(self._heap)[2]
            if not request.finished:
                yield request

    def __len__(self) -> int:
        return len(self._heap)
