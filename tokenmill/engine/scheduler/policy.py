"""Policies: who is served first, who makes room; and the waiting queue that follows one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tokenmill.engine.request import BATCH, Request


class Policy(Protocol):
    """A lane per class, an order within a lane, and how long until a request may rise by one lane."""

    @property
    def promote_after(self) -> float | None:
        """Seconds of waiting per lane risen; None: never."""
        ...

    def lane(self, request: Request) -> int: ...

    def key(self, request: Request) -> float:
        """Order within a lane; smaller is served first. Fixed while the request waits."""
        ...


@dataclass(frozen=True)
class Fcfs:
    """First come, first served."""

    promote_after: float | None = None

    def lane(self, request: Request) -> int:
        return 0

    def key(self, request: Request) -> float:
        return request.arrival


@dataclass(frozen=True)
class PriorityClasses:
    """Realtime before api before batch, first come first served within; who waits long rises, so nobody starves."""

    promote_after: float | None = 10.0

    def lane(self, request: Request) -> int:
        return min(max(request.priority, 0), BATCH)

    def key(self, request: Request) -> float:
        return request.arrival


POLICIES: dict[str, Policy] = {"fcfs": Fcfs(), "priority": PriorityClasses()}


class WaitingQueue:
    """Waiting requests in lanes. Only lane heads are ever compared, so a look costs nothing per queued request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[int, list[tuple[float, int, Request]]] = {}
        self._entry: dict[str, int] = {}  # id -> ticket of its live heap entry; others are stale
        self._size: dict[str, int] = {}  # id -> tokens it had when it was queued
        self._ticket = 0
        self._stale = 0  # removed since the heaps were last cleaned, at most
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            for _, ticket, request in lane:
                if self._entry.get(request.id) == ticket:
                    yield request

    def __contains__(self, request: Request) -> bool:
        return request.id in self._entry

    def push(self, request: Request) -> None:
        self._ticket += 1
        self._entry[request.id] = self._ticket
        lane = self._lanes.setdefault(self._policy.lane(request), [])
        heapq.heappush(lane, (self._policy.key(request), self._ticket, request))
        self._size[request.id] = len(request.tokens)
        self.num_tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        if self._entry.pop(request.id, None) is None:
            return
        self.num_tokens -= self._size.pop(request.id)
        self._stale += 1
        if self._stale > 64 + len(self._entry):  # the heaps hold more of the gone than of the waiting
            self._drop_stale()

    def _drop_stale(self) -> None:
        for lane, heap in self._lanes.items():
            self._lanes[lane] = [entry for entry in heap if self._entry.get(entry[2].id) == entry[1]]
            heapq.heapify(self._lanes[lane])
        self._stale = 0

    def head(self, now: float, may_promote: bool) -> tuple[int, Request] | None:
        """The next request and its effective lane, or None."""
        best: tuple[int, float, int, Request] | None = None
        for lane in list(self._lanes):
            heap = self._lanes[lane]
            while heap and self._entry.get(heap[0][2].id) != heap[0][1]:
                heapq.heappop(heap)
            if not heap:
                del self._lanes[lane]
                continue
            key, ticket, request = heap[0]
            risen = lane
            if may_promote and self._policy.promote_after:
                risen = max(0, lane - int((now - request.arrival) / self._policy.promote_after))
            if best is None or (risen, key, ticket) < best[:3]:
                best = (risen, key, ticket, request)
        return (best[0], best[3]) if best else None

    def first(self, count: int, now: float, may_promote: bool) -> list[tuple[int, Request]]:
        """The next `count` requests and their effective lanes, in order; at most the very first one has risen."""
        found: list[tuple[int, Request]] = []
        taken: list[tuple[float, int, Request]] = []
        while len(found) < count and (head := self.head(now, may_promote and not found)) is not None:
            found.append(head)
            taken.append(heapq.heappop(self._lanes[self._policy.lane(head[1])]))
        for entry in taken:
            heapq.heappush(self._lanes.setdefault(self._policy.lane(entry[2]), []), entry)
        return found
