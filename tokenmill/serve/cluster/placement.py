"""Placement: keeps as many replicas behind a router as the load needs: starts, replaces, drains and updates them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.plan.simulator.autoscale import Autoscale
from tokenmill.serve.cluster.launch import Handle, Launcher
from tokenmill.serve.router.fleet import Fleet

log = logging.getLogger("tokenmill.cluster")

BACKOFF_LEAST, BACKOFF_MOST = 0.5, 30.0  # seconds before another replica is started after one that did not come up


class Member:
    """A replica from the moment that it is wanted."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.url: str | None = None  # once it is ready
        self.leaving = False
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # ready, or it never will be
        self.life: asyncio.Task[None] | None = None


class Placement:
    """Tokens never pass through here: replicas are started and named to the router, which speaks to them itself."""

    def __init__(self, fleet: Fleet, launcher: Launcher, scale: Autoscale, drain_seconds: float) -> None:
        self.members: list[Member] = []
        self.target = scale.least
        self._fleet = fleet
        self._launcher = launcher
        self._scale = scale
        self._drain_seconds = drain_seconds
        self._calm = 0
        self._backoff = 0.0
        self._woken = asyncio.Event()
        self._updating = False
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def present(self) -> int:
        return sum(not one.leaving for one in self.members)

    async def run(self) -> None:
        """Until it is cancelled; then every replica is stopped. Raises what the first replicas raise if none starts."""
        try:
            await self._fill()
            first = list(self.members)
            await asyncio.wait([one.up for one in first])
            if all(one.up.exception() is not None for one in first):
                first[0].up.result()
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._scale.interval):
                        await self._woken.wait()
                if self._woken.is_set():  # somebody died
                    self._woken.clear()
                    await asyncio.sleep(self._backoff)
                else:
                    self._look()
                await self._fill()
        finally:
            await self.stop()

    async def update(self) -> int:
        """Replace every replica by a new one, one after the other: what runs is drained, and no stream is dropped.
        Returns how many. Raises ConfigError while another update is under way."""
        if self._updating:
            raise ConfigError("an update is under way; wait for its end")
        self._updating = True
        try:
            old = [one for one in self.members if not one.leaving]
            for one in old:
                if one.leaving or one not in self.members:
                    continue
                if await self._launcher.has_room():  # the new one first
                    await self._up(await self._start())
                    await self._leave(one)
                else:
                    await self._leave(one)
                    await self._up(await self._start())
            return len(old)
        finally:
            self._updating = False
            self._woken.set()

    async def stop(self) -> None:
        for one in self.members:
            one.leaving = True
        await asyncio.gather(*(one.handle.stop() for one in list(self.members)), return_exceptions=True)
        lives = [one.life for one in list(self.members) if one.life is not None]
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, *self._leaving, return_exceptions=True)
        await self._launcher.close()

    def as_json(self) -> dict[str, Any]:
        return {"wanted": self.target, "present": self.present, "updating": self._updating}

    # -- how many -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        outstanding = sum(len(one.bookings) for one in self._fleet.replicas)
        self.target, self._calm = self._scale.wanted(outstanding, self.present, self._calm)
        if self.target < self.present and not self._updating:
            load = {one.url: one.load for one in self._fleet.replicas}
            staying = [one for one in self.members if not one.leaving]
            for one in sorted(staying, key=lambda one: load.get(one.url or "", 0.0))[: self.present - self.target]:
                one.leaving = True
                log.info("a replica is let go", extra={"replica": one.url, "outstanding": outstanding})
                task = asyncio.create_task(self._leave(one))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _fill(self) -> None:
        while self.present < self.target and not self._updating:
            await self._start()

    async def _start(self) -> Member:
        member = Member(await self._launcher.launch())
        self.members.append(member)
        member.life = asyncio.create_task(self._live(member))
        return member

    async def _up(self, member: Member) -> None:
        """Wait until it takes work. Raises ReplicaFailed."""
        await member.up
        while member in self.members and not any(one.open for one in self._fleet.replicas if one.url == member.url):
            await self._fleet.turn(0.1)

    async def _live(self, member: Member) -> None:
        why = ""
        try:
            member.url = (await member.handle.ready()).rstrip("/")
            self._fleet.add(member.url)
            member.up.set_result(None)
            self._backoff = 0.0
            why = await member.handle.ended()
        except TokenmillError as error:
            why = str(error)
            if not member.up.done():
                member.up.set_exception(error)
                member.up.exception()  # somebody may not ask
        finally:
            self.members.remove(member)
            if member.url is not None:
                with contextlib.suppress(ConfigError):
                    await self._fleet.remove(member.url)
        if not member.leaving:
            log.warning("a replica was lost; another one is started", extra={"replica": member.url, "why": why})
            await member.handle.stop()
            self._backoff = 0.0 if member.url else min(max(2 * self._backoff, BACKOFF_LEAST), BACKOFF_MOST)
            self._woken.set()

    async def _leave(self, member: Member) -> None:
        """Send it nothing more, wait for what it has, end it. What it has not done by then goes on elsewhere."""
        member.leaving = True
        if member.url is not None:
            with contextlib.suppress(ConfigError):
                await self._fleet.drain(member.url, self._drain_seconds)
        await member.handle.stop()
