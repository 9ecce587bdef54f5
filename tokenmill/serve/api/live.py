"""GET /live: the engine's inside as a stream of snapshots, for the page's live view. Counts and short ids, no text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.engine.request import Request as EngineRequest
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.events import EngineEvent, Event, RequestEvent, StatsEvent, StepEvent
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.server_state import ServerState
from tokenmill.serve.http.sse import event
from tokenmill.serve.http.tenants import Tenant

log = logging.getLogger("tokenmill.serve")

BUSY, IDLE = 0.4, 1.0  # seconds between two snapshots
PATIENCE = 30.0  # for the engine's answer
STEPS = 200  # steps, and
SECONDS = 120  # seconds of token rates that a snapshot tells of
MOST_WATCHERS = 64
MOST_CELLS = 8192  # squares in the map of blocks; a larger pool has several blocks per square
MOST_ROWS = 100  # requests that are listed; the others are counted
_TOLD = (
    "state", "breaker", "restarts", "active", "queued", "queued_tokens", "accepted", "refused", "finished", "cache_hit",
    "cache_queried", "preemptions",
)  # fmt: skip
ID_LENGTH = 32  # characters of a request's id, with which the ids of its sequences begin


class Live:
    """Remembers the last steps and latencies, which costs an append per step. While somebody watches, it also asks the
    engine for its blocks and requests a few times per second, once for all watchers, and only if something moved."""

    def __init__(self, server: ServerState) -> None:
        self.watchers = 0
        self._server = server
        self._service: Service = server.service
        self._steps: deque[StepEvent] = deque(maxlen=STEPS)
        self._rates: deque[list[int]] = deque(maxlen=SECONDS + 1)  # second, output tokens, prefilled tokens
        self._ttft: deque[float] = deque(maxlen=512)
        self._gaps: deque[float] = deque(maxlen=4096)
        self._told: dict[str, int] = {}  # unfinished request -> how many of its tokens are in the two above
        self._moved = True  # since the engine was asked last
        self._asking: asyncio.Task[None] | None = None
        self._view: wire.EngineSnapshot | None = None  # what it said
        self._number = 0  # of the newest snapshot
        self._snapshot: dict[str, Any] = {}
        self._ids: list[str] = []  # of its rows
        self._turned = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.over = False  # the server is leaving, and nothing more will happen
        server.service.subscribe(self._listen)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.watchers += 1
        self._task = self._task or asyncio.create_task(self._watch(), name="tokenmill-live")
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers and self._task is not None:
                self._task.cancel()
                self._task = None
                self._snapshot = {}

    async def after(self, seen: int) -> int:
        """The number of the newest snapshot; waits for one that is newer than `seen`."""
        while self._number == seen or not self._snapshot:
            await self._turned.wait()
        return self._number

    def told(self, tenant: Tenant) -> dict[str, Any]:
        """The newest snapshot as this tenant may see it: of others' requests only how many there are."""
        rows: list[dict[str, Any]] = self._snapshot["rows"]
        if tenant.name and not tenant.limits.operator:
            rows = [row for id, row in zip(self._ids, rows) if id[:ID_LENGTH] in tenant.open_requests]
        return self._snapshot | {"rows": rows[:MOST_ROWS]}

    async def _watch(self) -> None:
        self._moved = True
        try:
            while True:
                if self._moved and self._asking is None:
                    self._moved = False
                    self._asking = asyncio.create_task(self._ask())
                if self._asking is not None:  # an engine in the middle of a long step answers when that is done
                    await asyncio.wait({self._asking}, timeout=BUSY)
                try:
                    self._take()
                except Exception:  # whoever watches must not disturb those who work
                    log.exception("the live view failed")
                await asyncio.sleep(BUSY if self._service.stats().active else IDLE)
        finally:
            self._stop_asking()

    async def _ask(self) -> None:
        self._view = await self._service.view(timeout=PATIENCE)
        self._asking = None

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _take(self) -> None:
        """A new snapshot, for all who wait for one."""
        self._snapshot = self._look()
        self._number += 1
        self._turned.set()
        self._turned = asyncio.Event()

    def _listen(self, event: Event) -> None:
        match event:
            case StepEvent():
                self._steps.append(event)
                if not self._rates or self._rates[-1][0] != int(event.at):
                    self._rates.append([int(event.at), 0, 0])
                self._rates[-1][1] += event.tokens
                self._rates[-1][2] += event.prefill_tokens
            case RequestEvent(kind="finished"):
                told = self._told.pop(event.id, 0)
                if not told and event.ttft is not None:
                    self._ttft.append(event.ttft)
                self._gaps.extend(event.token_gaps[max(0, told - 1) :])
            case EngineEvent():  # who was asked is gone
                self._stop_asking()
            case StatsEvent():
                return
        self._moved = True

    def _count_running(self, running: list[EngineRequest]) -> None:
        """The latencies of those who are not finished yet."""
        for request in running:
            times, told = request.metrics.token_times, self._told.get(request.id, 0)
            if len(times) > told:
                if not told and request.metrics.ttft is not None:
                    self._ttft.append(request.metrics.ttft)
                self._gaps.extend(after - before for before, after in pairwise(times[max(0, told - 1) :]))
                self._told[request.id] = len(times)

    def _look(self) -> dict[str, Any]:
        service, now = self._service, time.monotonic()
        stats, leaders = service.stats(), service.leaders()
        self._count_running(leaders)
        self.over = stats.state == "stopped" or (stats.state == "draining" and not stats.active)
        view = self._view = None if stats.state == "restarting" else self._view  # it is no more
        rows = self._rows(view, leaders, now)
        self._ids = list(rows)
        return {
            "model": self._server.name_of(service),
            "stage": None if service.startup.now is None else str(service.startup.now),
            "degraded": service.route() is not service,
            **{name: getattr(stats, name) for name in _TOLD},
            "drafts": stats.engine.drafts,
            "tiers": {name: msgspec.structs.asdict(one) for name, one in stats.engine.tiers.items()},
            "block_bytes": stats.engine.block_bytes,
            "evicted": stats.evicted_blocks,
            "memory": stats.engine.memory + stats.engine.device_memory,
            "pool": None if view is None else _pool(view.blocks, stats.engine.block_size),
            "running": sum(row["state"] != "waiting" for row in rows.values()),
            "waiting": sum(row["state"] == "waiting" for row in rows.values()),
            "rows": list(rows.values()),
            "steps": [[s.number, s.decodes, s.prefill_tokens, round(s.seconds * 1e3, 2)] for s in self._steps],
            "rates": self._per_second(int(now)),
            "ttft": percentiles(self._ttft),
            "itl": percentiles(self._gaps),
        }

    def _rows(
        self, view: wire.EngineSnapshot | None, leaders: list[EngineRequest], now: float
    ) -> dict[str, dict[str, Any]]:
        """Every sequence that is not finished, by id: as the engine saw it last, or as the front knows it."""
        if view is None:
            return {one.id: _row(one.id, _snapshot_of(one, False, now)) for one in leaders}
        seen = {self._service.request_of(row.key): row for row in view.rows}
        rows = {id: _row(id, row) for id, row in seen.items() if id is not None}
        others = [one for one in leaders if one.id not in seen]
        return rows | {one.id: _row(one.id, _snapshot_of(one, bool(one.num_output), now)) for one in others}

    def _per_second(self, now: int) -> list[list[int]]:
        """Output and prefilled tokens of each of the last seconds that are over, oldest first."""
        known = {second: [output, prefilled] for second, output, prefilled in self._rates}
        return [known.get(second, [0, 0]) for second in range(now - SECONDS, now)]


async def watch(server: ServerState, request: Request, tenant: Tenant) -> Response:
    """Snapshots of the engine as server-sent events, for as long as the client listens."""
    live: Live = request.app.state.live
    if live.watchers >= MOST_WATCHERS:
        message = f"{MOST_WATCHERS} others watch already; close one of those pages"
        raise HttpError(503, message, "too_many_watchers", retry_after=10.0)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_frames(live, tenant), headers=headers, media_type="text/event-stream")


async def _frames(live: Live, tenant: Tenant) -> AsyncIterator[bytes]:
    with live.watched():
        seen = -1
        while not live.over or seen < 0:
            seen = await live.after(seen)
            yield event(live.told(tenant))


def _row(id: str, row: wire.SequenceSnapshot) -> dict[str, Any]:
    state = "waiting" if not row.running else "decode" if row.computed >= row.prompt else "prefill"
    head, slash, number = id.partition("/")  # what follows a slash numbers the sequences of one request
    return {
        "id": head[:8] + slash + number,  # enough to find it in a log
        "state": state,
        "prompt": row.prompt,
        "output": row.output,
        "cached": row.cached,
        "blocks": row.blocks,
        "age": round(row.age, 2),
    }


def _snapshot_of(request: EngineRequest, running: bool, now: float) -> wire.SequenceSnapshot:
    """A sequence as the front knows it."""
    cached, age = request.metrics.reused_tokens, now - request.arrival
    computed = request.prompt_len if running else 0
    return wire.SequenceSnapshot(0, running, request.prompt_len, request.num_output, computed, 0, cached, age)


def _pool(blocks: bytes, block_size: int) -> dict[str, Any]:
    """The map as a string of digits, one per square: the state that most blocks of the square have."""
    each = -(-len(blocks) // MOST_CELLS) or 1
    if each == 1:
        cells = blocks
    else:
        several = (blocks[start : start + each] for start in range(0, len(blocks), each))
        cells = bytes(max(range(4), key=lambda state: (part.count(state), state)) for part in several)
    return {
        "blocks": len(blocks),
        "block_size": block_size,
        "free": blocks.count(wire.FREE),
        "cached": blocks.count(wire.CACHED),
        "used": blocks.count(wire.USED),
        "shared": blocks.count(wire.SHARED),
        "each": each,
        "cells": cells.translate(b"0123" + bytes(252)).decode(),
    }


def percentiles(values: deque[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds, by nearest rank, and how many values there are."""
    if not values:
        return None
    ranked, last = sorted(values), len(values) - 1
    found = {f"p{part}": round(ranked[min(last, part * len(ranked) // 100)] * 1e3, 2) for part in (50, 90, 99)}
    return found | {"n": len(ranked)}
