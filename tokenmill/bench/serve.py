"""`tokenmill bench serve`: load on an OpenAI-compatible server, and whether every answer is the one it should be."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.bench.figures import Answer, Run
from tokenmill.bench.serve_client import Connection, Exchange, Heard, ServerAddress, read
from tokenmill.bench.workloads import Ask
from tokenmill.errors import TokenmillError

_FILES = 64  # that are no connections

_TICK = 0.5  # seconds between two looks at how far it is

Report = Callable[[int, int, str], None]  # done, in all, what
Watch = Callable[[int, int, float], None]  # answers that have ended, in all, output tokens per second lately


@dataclass(frozen=True)
class Load:
    """What is asked, and how much of it at once."""

    asks: list[Ask]
    streams: int  # at once; requests that have a time of their own do not wait for a stream
    model: str | None = None
    ignore_eos: bool = True
    timeout: float = 600.0  # seconds per request


@dataclass
class Check:
    """Answers under load against the answers that the same prompts got alone."""

    equal: int = 0
    lost: int = 0  # failed, or without an end
    mixed_up: int = 0  # another request's answer
    different: int = 0

    def add(self, other: Check) -> None:
        for name in ("equal", "lost", "mixed_up", "different"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


async def drive(place: ServerAddress, load: Load, watch: Watch | None = None) -> Run:
    """Put the load on the server. Nothing is parsed before the last answer has ended."""
    timed = any(ask.at is not None for ask in load.asks)
    _allow_files((len(load.asks) if timed else min(load.streams, len(load.asks))) + _FILES)
    asked = [place.post("/v1/completions", _body(load, ask)) for ask in load.asks]
    found: list[Exchange | None] = [None] * len(asked)
    idle: list[Connection] = []
    gate, heard = asyncio.Semaphore(load.streams), Heard()
    done = 0

    async def ask(number: int, meant: float | None) -> None:
        nonlocal done
        connection = idle.pop() if idle else Connection(place, heard)
        try:
            found[number] = await connection.ask(asked[number], load.timeout, meant)
        finally:
            idle.append(connection)
            if meant is None:
                gate.release()
        done += 1

    async def tell(watch: Watch) -> None:
        before = 0
        while True:
            await asyncio.sleep(_TICK)
            tokens = heard.events - 2 * done  # every answer ends with its usage and [DONE]
            watch(done, len(asked), (tokens - before) / _TICK)
            before = tokens

    began = time.perf_counter()
    teller = None if watch is None else asyncio.create_task(tell(watch))
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(load.asks):
                if one.at is None:
                    await gate.acquire()
                    tasks.create_task(ask(number, None))
                else:
                    await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
                    tasks.create_task(ask(number, began + one.at))
    finally:
        if teller is not None:
            teller.cancel()
        for connection in idle:
            connection.close()
    seconds = time.perf_counter() - began
    return Run(seconds, [read(exchange, began) for exchange in found if exchange is not None])


async def alone(place: ServerAddress, load: Load, watch: Watch | None = None) -> list[str]:
    """The answer to each prompt when nothing else runs. Raises what the server said if one fails."""
    asks = [replace(ask, at=None) for ask in load.asks]
    run = await drive(place, replace(load, asks=asks, streams=1), watch)
    for answer in run.answers:
        if answer.error is not None:
            raise TokenmillError(f"an answer failed when it was asked for alone ({answer.error}): {answer.message}")
    return [answer.text for answer in run.answers]


def compare(answers: list[Answer], expected: list[str]) -> Check:
    check, whose = Check(), Counter(expected)
    for answer, right in zip(answers, expected, strict=True):
        if answer.error is not None:
            check.lost += 1
        elif answer.text == right:
            check.equal += 1
        elif whose[answer.text]:
            check.mixed_up += 1
        else:
            check.different += 1
    return check


def _body(load: Load, ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.model is not None:
        body["model"] = load.model
    if load.ignore_eos:
        body["ignore_eos"] = True
    return body


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
