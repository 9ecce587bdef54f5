"""Replica: one server behind the router: whether it takes work, how much it has, and what its prefix cache holds."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.kv.prefix import IDENTITY_BYTES
from tokenmill.routing.cache_view import CacheEvent, CacheSnapshot, CacheView
from tokenmill.routing.routers import TYPICAL_OUTPUT
from tokenmill.serve.http.routed import PROTOCOL, SECRET
from tokenmill.serve.router.client import Headers, ReplicaLost, ReplicaPool, Reply, StaleConnection
from tokenmill.serve.router.settings import RouterSettings
from tokenmill.serve.router.withdrawals import Withdrawals

log = logging.getLogger("tokenmill.router")

AGAIN_LEAST, AGAIN_MOST = 0.1, 0.5  # seconds between two tries to reach a replica: one that is back is wanted at once
QUIET = 1.0  # seconds without a word after which one looks whether its machine still takes connections
REACH = 1.0  # seconds for that: it is the kernel that answers, however busy the replica is
USUAL_SECONDS_PER_TOKEN = 1e-4  # as long as nothing was measured
MOST_EVENT = 256 << 20  # bytes of one event: a snapshot of four million blocks has 85 MB


@dataclass(eq=False)
class Booking:
    """What one request on its way makes a replica do, as far as one can tell."""

    missing: int  # tokens of its prompt that have to be computed; 0 once it has begun to answer
    output: int = TYPICAL_OUTPUT
    movable: bool = False  # it may leave a replica whose engine died, rather than wait for the next one
    reply: Reply | None = None  # of a stream

    @property
    def tokens(self) -> int:
        return self.missing + self.output


class Replica:
    """States: connecting, unfit (it must not be used; `why` says why), starting, ready, restarting, draining, stopped,
    unavailable, lost. Only one that is ready, and that nobody wants drained, takes work."""

    def __init__(
        self,
        number: int,
        url: str,
        settings: RouterSettings,
        view: CacheView | None,
        forget: Callable[[int], None],
        judge: Callable[[Replica, dict[str, Any]], str | None],
        others: Callable[[Replica], bool],
        measured: Callable[[], None],
    ) -> None:
        """`view` is where its events go; `forget` is told that it lost all that it had; `judge` says what is wrong
        with a replica of this kind, if anything; `others` whether another one takes work; `measured` is told
        that it said how fast it is."""
        self.number = number
        self.url = url
        self.home = zlib.crc32(url.encode())  # its name in the ids of events, the same for all routers
        self.pool = ReplicaPool(url, settings.connect_seconds)
        self._events = ReplicaPool(url, settings.connect_seconds)
        self.withdrawals = Withdrawals(ReplicaPool(url, settings.connect_seconds), self._headers)
        self.state = "connecting"
        self.why = ""
        self.model: str | None = None
        self.same: str | None = None
        self.version = ""
        self.draining = False  # wanted by somebody
        self.seconds_per_token = USUAL_SECONDS_PER_TOKEN  # as its fleet counts with it
        self.measured: float | None = None  # the same, as it says
        self.bookings: set[Booking] = set()
        self.turned = asyncio.Event()  # set whenever its state has changed
        self._told: dict[str, Any] = {}
        self._settings = settings
        self._view = view
        self._forget = forget
        self._judge = judge
        self._others = others
        self._measured = measured

    @property
    def open(self) -> bool:
        return self.state == "ready" and not self.draining

    @property
    def load(self) -> float:
        """Seconds: what was sent there and is not done, or what it says itself, since other routers may send, too."""
        booked = sum([booking.tokens for booking in self.bookings]) * self.seconds_per_token
        return max(booked, float(self._told.get("ahead") or 0.0))

    def as_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "state": "draining" if self.draining and self.state == "ready" else self.state,
            "why": self.why or None,
            "open": self.open,
            "model": self.model,
            "version": self.version or None,
            "requests": len(self.bookings),
            "load_seconds": round(self.load, 4),
            "active": self._told.get("active"),
        }

    def cancel(self, name: str) -> None:
        """Nobody waits for this attempt at a request any more."""
        self.withdrawals.add(name)

    async def has_stream(self, request: str) -> bool:
        """Whether it has the stream of a request, or had it a moment ago."""
        try:
            async with asyncio.timeout(self._settings.probe_seconds):
                target = b"/cluster/streams/" + request.encode()
                try:
                    reply = await self.pool.request(b"GET", target, self._headers(), b"")
                except StaleConnection:
                    reply = await self.pool.request(b"GET", target, self._headers(), b"", fresh=True)
                with contextlib.closing(reply):
                    await reply.whole()
                    return reply.status == 200
        except (ReplicaLost, TimeoutError):
            return False

    async def watch(self) -> None:
        """Follow its events for as long as it is one of the cluster; reconnect whenever they end."""
        pause = AGAIN_LEAST
        while True:
            try:
                async with asyncio.timeout(self._settings.connect_seconds):
                    reply = await self._events.request(b"GET", b"/cluster/events", self._headers(), b"", fresh=True)
                if reply.status != 200:
                    self._set("unfit", await _refusal(reply))
                else:
                    pause = AGAIN_LEAST
                    await self._follow(reply)
                    self._set("lost", "its events ended")
            except TimeoutError:
                why = f"it said nothing for {self._settings.hang_seconds:g} s"
                self._set("lost", why)
                self.pool.abort_all(why)  # it hangs: what it was to answer is asked elsewhere
            except _Unreachable as error:
                self._set("lost", str(error))
                self.pool.abort_all(str(error))
            except (ReplicaLost, ValueError, KeyError) as error:
                self._set("lost", str(error))
            if self._view is not None:
                self._view.clear()
            self._forget(self.number)
            await asyncio.sleep(pause)
            pause = min(2 * pause, AGAIN_MOST)

    async def _follow(self, reply: Reply) -> None:
        data = bytearray()
        with contextlib.closing(reply):
            while True:
                if not (part := await self._heard(reply)):
                    return
                before = max(0, len(data) - 1)
                data += part
                if data.find(b"\n\n", before) >= 0:
                    *events, rest = bytes(data).split(b"\n\n")
                    for one in events:
                        self._take(msgspec.json.decode(one.removeprefix(b"data: ")))
                    data = bytearray(rest)
                if len(data) > MOST_EVENT:
                    raise ReplicaLost("an event of it does not end")

    async def _heard(self, reply: Reply) -> bytes:
        """Its next words. Raises TimeoutError where it hangs, and _Unreachable where its machine is gone: that is known
        sooner, because a machine that is there takes connections even for a process that is busy or stopped."""
        reading = asyncio.ensure_future(reply.read())
        try:
            async with asyncio.timeout(self._settings.hang_seconds):
                while True:
                    await asyncio.wait({reading}, timeout=QUIET)
                    if reading.done():
                        return await reading
                    if (problem := await self._events.unreachable(REACH)) is not None and not reading.done():
                        raise _Unreachable(f"it said nothing, and {problem}")
        finally:
            reading.cancel()

    def _take(self, told: dict[str, Any]) -> None:
        if "epoch" not in told:
            self._fares(told)
            return
        if self._view is None:
            return
        at = told["epoch"], told["sequence"]
        if "snapshot" in told:
            if told["epoch"] != self._view.epoch:
                self._forget(self.number)  # another life: nothing that was sent before is there
            self._view.reset(CacheSnapshot(*at, _identities(told["snapshot"])))
        elif not self._view.take(CacheEvent(*at, _identities(told["stored"]), _identities(told["evicted"]))):
            raise ReplicaLost("some of its events are missing")  # a new connection begins with a snapshot

    def _fares(self, told: dict[str, Any]) -> None:
        self._told = told
        self.version = str(told.get("version", ""))
        self.measured = told.get("seconds_per_token") or self.measured
        self._measured()
        if told.get("protocol") != PROTOCOL:
            speaks = told.get("protocol")
            self._set("unfit", f"it speaks version {speaks} of the protocol, the router {PROTOCOL}; use one tokenmill")
            return
        if (same := told.get("same")) is not None:
            self.model, self.same = told.get("model"), same
            if (problem := self._judge(self, told)) is not None:
                self._set("unfit", problem)
                return
        state = str(told["state"])
        self._set("ready" if told["ready"] else "unavailable" if state == "ready" else state)
        if state == "restarting" and self._others(self):
            for booking in list(self.bookings):
                if booking.movable and booking.reply is not None:
                    booking.reply.close("its engine died")

    def _headers(self) -> Headers:
        secret = self._settings.http.cluster_secret
        return [(b"host", b"localhost"), *([(SECRET.encode(), secret.encode())] if secret else [])]

    def _set(self, state: str, why: str = "") -> None:
        if (state, why) == (self.state, self.why):
            return
        left = state == "lost" and self.state in ("draining", "lost")  # as it said, or it was told already
        level = logging.INFO if left or state in ("ready", "starting", "draining") else logging.WARNING
        said = "not there yet" if (self.state, state) == ("connecting", "lost") else "gone" if left else state
        log.log(level, "replica %s is %s%s", self.url, said, f": {why}" if why else "")
        self.state, self.why = state, why
        self.turned.set()


class _Unreachable(Exception):
    """The machine of a replica takes no connections any more."""


async def _refusal(reply: Reply) -> str:
    """Why a replica does not want us, in its own sentence."""
    try:
        async with asyncio.timeout(5):
            body = await reply.whole()
        return str(msgspec.json.decode(body)["error"]["message"])
    except (TimeoutError, ValueError, KeyError, TypeError):
        return f"it answers {reply.status} where `tokenmill serve` tells its events"


def _identities(joined: str) -> tuple[bytes, ...]:
    data = base64.b64decode(joined)
    return tuple(data[at : at + IDENTITY_BYTES] for at in range(0, len(data), IDENTITY_BYTES))
