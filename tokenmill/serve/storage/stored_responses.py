"""StoredResponses: the responses that clients may ask for again or go on from, in memory, for a while, by tenant."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenmill.serve.errors import HttpError

MOST = 100_000  # responses of all tenants
_OVERHEAD = 1000  # bytes of a response beside its JSON


@dataclass
class StoredResponse:
    """One response. What it holds is JSON text, of which memory knows the size and the garbage collector nothing."""

    id: str
    previous: str | None  # the id of the response that it goes on from
    given: bytes  # the items of its own input, a list
    made: bytes = b"[]"  # the items of its output, without log-probabilities
    response: bytes = b""  # as clients see it
    status: str = "completed"
    in_background: bool = False  # it is made while nobody waits for it, or was
    cancel: Callable[[], None] | None = None  # ends that; None: there is nothing to end
    task: asyncio.Task[None] | None = None  # that makes it
    used: float = 0.0  # when somebody asked for it last
    counted: int = 0  # bytes, when it was put here

    @property
    def running(self) -> bool:
        return self.status == "in_progress"

    @property
    def size(self) -> int:
        return len(self.given) + len(self.made) + len(self.response) + _OVERHEAD


class StoredResponses:
    """At most `most_bytes` (0: none) and MOST of them, each for `seconds` after it was last asked for. Where there is
    no room, the tenant who has most gives up the one that was not asked for longest."""

    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}  # by tenant; last asked for, last
        self._bytes: Counter[str] = Counter()  # by tenant
        self._tasks: set[asyncio.Task[None]] = set()  # that make some of them in the background

    @property
    def on(self) -> bool:
        return self._most_bytes > 0

    def keep(self, tenant: str, stored: StoredResponse) -> None:
        """Also one that is there already and has changed."""
        self.remove(tenant, stored.id)
        stored.used = self._clock()
        self._kept.setdefault(tenant, OrderedDict())[stored.id] = stored
        stored.counted = stored.size
        self._bytes[tenant] += stored.counted
        self._tidy()

    def make(self, stored: StoredResponse, work: Coroutine[Any, Any, None]) -> None:
        """Have a response made in the background; it may be forgotten meanwhile, its work is not."""
        stored.task = asyncio.create_task(work)
        self._tasks.add(stored.task)
        stored.task.add_done_callback(self._tasks.discard)

    def remove(self, tenant: str, id: str) -> bool:
        kept = self._kept.get(tenant)
        stored = None if kept is None else kept.pop(id, None)
        if stored is None:
            return False
        self._bytes[tenant] -= stored.counted
        if not kept:
            del self._kept[tenant], self._bytes[tenant]
        return True

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        self._tidy()
        kept = self._kept.get(tenant)
        stored = None if kept is None else kept.get(id)
        if kept is not None and stored is not None:
            stored.used = self._clock()
            kept.move_to_end(id)
        return stored

    def found(self, tenant: str, id: str) -> StoredResponse:
        stored = self.get(tenant, id)
        if stored is None:
            raise HttpError(
                404,
                f"there is no response {id[:100]!r}; it was not stored, was deleted, or was forgotten after a time",
                "not_found",
            )
        return stored

    def chain(self, tenant: str, id: str | None) -> list[StoredResponse]:
        """The response and those that it goes on from, oldest first. Raises HttpError where one is gone."""
        found: list[StoredResponse] = []
        wanted = id
        while wanted is not None:
            stored = self.get(tenant, wanted)
            if stored is None:
                why = "there is none" if wanted == id else f"{wanted[:100]!r}, which it goes on from, is gone"
                raise HttpError(
                    400,
                    f"previous_response_id is {str(id)[:100]!r}, but {why}; send the whole input",
                    "previous_response_not_found",
                    "previous_response_id",
                )
            found.append(stored)
            wanted = stored.previous
        return found[::-1]

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def _tidy(self) -> None:
        late = self._clock() - self._seconds
        for tenant in [name for name, kept in self._kept.items() if next(iter(kept.values())).used < late]:
            kept = self._kept[tenant]
            while kept and (first := next(iter(kept.values()))).used < late:
                self.remove(tenant, first.id)
        while self._bytes.total() > self._most_bytes or len(self) > MOST:
            [(tenant, _)] = self._bytes.most_common(1)
            self.remove(tenant, next(iter(self._kept[tenant])))
