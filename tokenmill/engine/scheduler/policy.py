"""Policies: who is served first, who makes room; and the waiting queue that follows one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.engine.request import BATCH, Request
from tokenmill.engine.scheduler.predict import HIGH, MEDIAN, LengthPredictor, Recent
from tokenmill.kv.manager import KVManager

PROMPT_WEIGHT = 0.2  # what a prompt token costs in output tokens: 0.1 on a large GPU, 0.4 on a CPU


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

    def admits(self, request: Request, need: int, running: Sequence[Request], kv: KVManager) -> bool:
        """Whether a request that fits (it takes `need` blocks now) may start beside those who run."""
        return True

    def learn(self, request: Request) -> None:
        """A request ended."""
        return


@dataclass(frozen=True)
class Fcfs(Policy):
    """First come, first served."""

    promote_after: float | None = None

    def lane(self, request: Request) -> int:
        return 0

    def key(self, request: Request) -> float:
        return request.arrival


@dataclass(frozen=True)
class PriorityClasses(Policy):
    """Realtime before api before batch, first come first served within; who waits long rises, so nobody starves."""

    promote_after: float | None = 10.0

    def lane(self, request: Request) -> int:
        return min(max(request.priority, 0), BATCH)

    def key(self, request: Request) -> float:
        return request.arrival


@dataclass(frozen=True)
class ShortestFirst(PriorityClasses):
    """Within a class whoever will probably be done soonest; memory is lent against the predicted length.

    A request's place is its arrival plus up to `patience` seconds, by its rank in length among recent requests. So
    nobody is overtaken by one who came more than `patience` later, however short, and nothing is sorted anew with time.
    """

    patience: float = 60.0
    reserve: bool = True  # newcomers wait while the answers that run are predicted to outgrow the memory
    predictor: LengthPredictor = field(default_factory=LengthPredictor, compare=False)
    _work: Recent = field(default_factory=lambda: Recent(2048), compare=False, repr=False)

    def key(self, request: Request) -> float:
        self.predictor.promise(request)
        work = PROMPT_WEIGHT * len(request.tokens) + self.predictor.total(request, MEDIAN) - request.num_output
        if request.num_output == 0:
            self._work.add(work)
        return request.arrival + self.patience * self._work.rank(work)

    def admits(self, request: Request, need: int, running: Sequence[Request], kv: KVManager) -> bool:
        """By the largest memory that all would ever hold together if each ended as predicted."""
        if not self.reserve or not running or request.beams is not None or request.fork_from is not None:
            return True
        room, size = kv.pool.num_blocks, kv.block_size
        held = room - kv.pool.num_free + need
        alive = [(self._left(one), len(one.blocks)) for one in running] + [(self._left(request), need)]
        if held + sum(left for left, _ in alive) / size <= room:  # even if nobody gave anything back
            return True
        alive.sort(reverse=True)
        for ends, (left, blocks) in zip(range(len(alive), 0, -1), reversed(alive)):  # the next to end comes first
            if held + ends * left / size > room:
                return False
            held -= blocks
        return True

    def learn(self, request: Request) -> None:
        self.predictor.learn(request)

    def _left(self, request: Request) -> float:
        """Output tokens to come; whoever is past the prediction is given a quarter more."""
        return max(self.predictor.promised(request, HIGH) - request.num_output, 0.25 * request.num_output, 1.0)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "priority": PriorityClasses, "sjf": ShortestFirst}


class WaitingQueue:
    """Waiting requests in lanes. Only lane heads are ever compared, so a look costs nothing per queued request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[int, list[tuple[float, int, int, Request]]] = {}  # key, place, ticket
        self._entry: dict[str, int] = {}  # id -> ticket of its live heap entry; others are stale
        self._size: dict[str, int] = {}  # id -> tokens it had when it was queued
        self._ticket = 0
        self._stale = 0  # removed since the heaps were last cleaned, at most
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            for _, _, ticket, request in lane:
                if self._entry.get(request.id) == ticket:
                    yield request

    def __contains__(self, request: Request) -> bool:
        return request.id in self._entry

    def push(self, request: Request, place: int | None = None) -> None:
        """place: the one that it had before, among requests of equal keys."""
        self._ticket += 1
        self._entry[request.id] = self._ticket
        lane = self._lanes.setdefault(self._policy.lane(request), [])
        entry = self._policy.key(request), self._ticket if place is None else place, self._ticket, request
        heapq.heappush(lane, entry)
        self._size[request.id] = len(request.tokens)
        self.num_tokens += len(request.tokens)

    @property
    def next_place(self) -> int:
        """That of a request that came now."""
        return self._ticket + 1

    def place(self, request: Request) -> int:
        """Of a request that has just been found at the front: where it stands among those of equal keys."""
        lane = self._lanes[self._policy.lane(request)]
        ticket = self._entry[request.id]
        return next(place for _, place, one, _ in lane if one == ticket)

    def remove(self, request: Request) -> None:
        if self._entry.pop(request.id, None) is None:
            return
        self.num_tokens -= self._size.pop(request.id)
        self._stale += 1
        if self._stale > 64 + len(self._entry):  # the heaps hold more of the gone than of the waiting
            self._drop_stale()

    def _drop_stale(self) -> None:
        for lane, heap in self._lanes.items():
            self._lanes[lane] = [entry for entry in heap if self._entry.get(entry[3].id) == entry[2]]
            heapq.heapify(self._lanes[lane])
        self._stale = 0

    def head(self, now: float, may_promote: bool) -> tuple[int, Request] | None:
        """The next request and its effective lane, or None."""
        best: tuple[int, float, int, Request] | None = None
        for lane in list(self._lanes):
            heap = self._lanes[lane]
            while heap and self._entry.get(heap[0][3].id) != heap[0][2]:
                heapq.heappop(heap)
            if not heap:
                del self._lanes[lane]
                continue
            key, place, _, request = heap[0]
            risen = lane
            if may_promote and self._policy.promote_after:
                risen = max(0, lane - int((now - request.arrival) / self._policy.promote_after))
            if best is None or (risen, key, place) < best[:3]:
                best = (risen, key, place, request)
        return (best[0], best[3]) if best else None

    def first(self, count: int, now: float, may_promote: bool) -> list[tuple[int, Request]]:
        """The next `count` requests and their effective lanes, in order; at most the very first one has risen."""
        found: list[tuple[int, Request]] = []
        taken: list[tuple[float, int, int, Request]] = []
        while len(found) < count and (head := self.head(now, may_promote and not found)) is not None:
            found.append(head)
            taken.append(heapq.heappop(self._lanes[self._policy.lane(head[1])]))
        for entry in taken:
            heapq.heappush(self._lanes.setdefault(self._policy.lane(entry[3]), []), entry)
        return found
