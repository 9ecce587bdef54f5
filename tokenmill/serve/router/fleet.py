"""Fleet: the replicas behind a router. They may come and go while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Collection
from typing import Any

from tokenmill.errors import ConfigError
from tokenmill.routing.prices import evened
from tokenmill.routing.routers import Ask, CacheAware, Choice, NobodyOpen, RoundRobin, policy_named
from tokenmill.serve.http.event_ids import Position
from tokenmill.serve.router.replica import Replica
from tokenmill.serve.router.settings import RouterSettings, address_of

DRAIN_LOOK = 0.05  # seconds
SETTLE = 1.0  # seconds that a client who comes back waits for replicas of which nothing was heard yet
SLACK = 0.05  # seconds: what replicas say of their queues is older than that
SEARCHES = 16  # streams for which all replicas are asked at once


class Fleet:
    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.replicas: list[Replica] = []
        if settings.policy == "cache":
            self.router: Any = CacheAware(settings.seed, imbalance=settings.imbalance, slack=SLACK)
        else:
            self.router = policy_named(settings.policy, settings.seed)
        self.prefill: dict[str, list[Replica]] = {}  # by the replica that they push to
        self._any = RoundRobin()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._searches = asyncio.Semaphore(SEARCHES)

    def start(self) -> None:
        for url in self.settings.replicas:
            self.add(url)
        for number, (url, replica) in enumerate(self.settings.prefill, 1):
            judge, others, measured = self._judge, self._others, self._measured
            worker = Replica(-number, url, self.settings, None, lambda number: None, judge, others, measured)
            self.prefill.setdefault(replica, []).append(worker)
            self._tasks[-number] = asyncio.create_task(worker.watch(), name=f"tokenmill-watch-prefill-{number}")

    def prefill_for(self, replica: Replica) -> Replica | None:
        """The least loaded of those who read prompts for it, if there is one."""
        found = [one for one in self.prefill.get(replica.url, ()) if one.open]
        return min(found, key=lambda one: one.load, default=None)

    async def holder(self, position: Position) -> str | None:
        """The address of the replica that has a stream, if one does: first the one that told it last is asked. A
        router that has just started hears of them first."""
        until = time.monotonic() + SETTLE
        while any(one.state == "connecting" for one in self.replicas) and time.monotonic() < until:
            await self.turn(DRAIN_LOOK)
        told = [one for one in self.replicas if one.open and one.home == position.home]
        found = await _holder(told, position.request)
        if found is None:
            async with self._searches:
                others = [one for one in self.replicas if one.open and one not in told]
                found = await _holder(others, position.request)
        return found

    async def stop(self) -> None:
        await asyncio.gather(*(one.withdrawals.stop() for one in self.replicas))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for replica in (*self.replicas, *(one for workers in self.prefill.values() for one in workers)):
            replica.pool.abort_all("the router is leaving")

    def add(self, url: str) -> Replica:
        """Raises ConfigError for an address that is none, or that is there."""
        url = url.rstrip("/")
        address_of(url)
        if any(one.url == url for one in self.replicas):
            raise ConfigError(f"the replica {url} is there already")
        taken = {one.number for one in self.replicas}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        view = self.router.view(number) if isinstance(self.router, CacheAware) else None
        forget, judge, others = self.router.forget, self._judge, self._others
        replica = Replica(number, url, self.settings, view, forget, judge, others, self._measured)
        replica.turned = self._changed
        self.replicas.append(replica)
        self._tasks[number] = asyncio.create_task(replica.watch(), name=f"tokenmill-watch-{number}")
        return replica

    def named(self, url: str) -> Replica:
        """Raises ConfigError."""
        for one in self.replicas:
            if one.url == url.rstrip("/"):
                return one
        known = ", ".join(one.url for one in self.replicas) or "none"
        raise ConfigError(f"there is no replica {url[:200]!r}; there is {known}")

    async def drain(self, url: str, seconds: float) -> int:
        """Send it nothing more, and wait until what is there has ended. Returns how many requests are still there."""
        replica = self.named(url)
        replica.draining = True
        deadline = time.monotonic() + seconds
        while replica.bookings and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_LOOK)
        return len(replica.bookings)

    async def remove(self, url: str) -> None:
        """Forget it. What it still has goes on elsewhere."""
        replica = self.named(url)
        replica.draining = True
        task = self._tasks.pop(replica.number, None)
        if task is None:  # somebody else is at it
            return
        task.cancel()
        await asyncio.wait({task})
        replica.pool.abort_all("the replica was removed")
        self.router.forget(replica.number)
        self.replicas.remove(replica)  # last: another one may be given its number from now on

    def choose(self, ask: Ask, without: set[Replica]) -> tuple[Replica, Choice]:
        """Raises NobodyOpen."""
        found = [one for one in self.replicas if one not in without]
        choice = self.router.choose(ask, found)
        return self._numbered(choice.number), choice

    def any_open(self, without: Collection[Replica] = ()) -> Replica:
        """One after the other. Raises NobodyOpen."""
        return self._numbered(self._any.choose(Ask(), [one for one in self.replicas if one not in without]).number)

    def home(self, key: bytes) -> Replica:
        """Where what a replica keeps for this client is: the same one as long as it is there. Raises NobodyOpen."""
        if not self.replicas:
            raise NobodyOpen("there are no replicas; add one")
        ordered = sorted(self.replicas, key=lambda one: one.url)
        return ordered[int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) % len(ordered)]

    async def turn(self, seconds: float) -> None:
        """Wait until some replica's state has changed, or so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _numbered(self, number: int) -> Replica:
        return next(one for one in self.replicas if one.number == number)

    def _measured(self) -> None:
        for some in (self.replicas, [one for found in self.prefill.values() for one in found]):
            prices = evened({one.number: one.measured for one in some})
            for one in some:
                one.seconds_per_token = prices.get(one.number, one.seconds_per_token)

    def _others(self, replica: Replica) -> bool:
        return any(one.open for one in self.replicas if one is not replica)

    def _judge(self, replica: Replica, told: dict[str, Any]) -> str | None:
        """What is wrong with a replica that would give other answers than the others."""
        if isinstance(self.router, CacheAware) and told.get("block_size"):
            self.router.block_size = told["block_size"]
        others = [one for one in self.replicas if one is not replica and one.state == "ready" and one.same]
        for other in others:
            if other.same != replica.same:
                return (
                    f"it serves {replica.model!r} in another way than {other.url} serves {other.model!r} (model, "
                    "length, block size, dtype, quantization or cache differ); give all replicas the same options"
                )
        return None


async def _holder(some: list[Replica], request: str) -> str | None:
    answers = await asyncio.gather(*(one.has_stream(request) for one in some))
    return next((one.url for one, has in zip(some, answers) if has), None)
