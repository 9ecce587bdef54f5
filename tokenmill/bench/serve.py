"""`tokenmill bench serve`: load on an OpenAI-compatible server, and whether every answer is the one it should be."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenmill.bench.achieved import Roof, work_of
from tokenmill.bench.figures import Answer, Run, of_point
from tokenmill.bench.serve_client import Connection, Exchange, Heard, ServerAddress, read, run
from tokenmill.bench.serve_started import Started, counters
from tokenmill.bench.workloads import Ask, Mix
from tokenmill.errors import TokenmillError
from tokenmill.plan.demand.slo import Slo
from tokenmill.serve.engine.process_limits import allow_files

_FILES = 64  # that are no connections

_TICK = 0.5  # seconds between two looks at how far it is

Report = Callable[[int, int, str], None]  # done, in all, what
Watch = Callable[[int, int, float], None]  # answers that have ended, in all, output tokens per second lately
WatchOf = Callable[[str], Watch]  # what is under way -> whom to tell how far it is

# Between repeats and between points: the prompts of each are other ones, so that no cache has them.
REPEAT_STRIDE, POINT_STRIDE = 1_000_003, 1_000_000_007
_STEPS = "tokenmill_step_seconds_count"


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
    allow_files((len(load.asks) if timed else min(load.streams, len(load.asks))) + _FILES)
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


@dataclass(frozen=True)
class LoadPlan:
    repeats: int = 1
    warm_up: int = 0  # requests
    check: bool = False  # every answer alone first
    promise: Slo | None = None
    seed: int = 0


@dataclass
class Point:
    mix: Mix
    runs: list[Run]
    figures: dict[str, Any]


def measure(
    place: ServerAddress, load: Load, mix: Mix, plan: LoadPlan, watch: WatchOf, roof: Roof | None, own: Started | None
) -> Point:
    """Put one load on a server, as often as the plan says. `load` says everything but the requests."""
    runs: list[Run] = []
    check = Check() if plan.check else None
    if plan.warm_up:
        asks = mix.warm_up(plan.warm_up, plan.seed)
        run(drive(place, replace(load, asks=asks, streams=min(load.streams, len(asks))), watch("warm-up")))
    before = counters(place)
    for number in range(plan.repeats):
        this = replace(load, asks=mix.asks(plan.seed + number * REPEAT_STRIDE))
        expected = run(alone(place, this, watch("answers alone"))) if check is not None else None
        what = "answers" if plan.repeats == 1 else f"answers, repeat {number + 1} of {plan.repeats}"
        runs.append(run(drive(place, this, watch(what))))
        if check is not None and expected is not None:
            check.add(compare(runs[-1].answers, expected))
    after = counters(place)
    found = of_point(runs, plan.promise)
    found["check"] = None if check is None else asdict(check)
    found["memory"] = _memory(after, own)
    steps = round(after.get(_STEPS, 0) - before.get(_STEPS, 0))
    if roof is not None and steps and check is None:
        answers = [answer for one in runs for answer in one.good]
        found["achieved"] = roof.achieved(work_of(answers, steps, roof.shape), found["seconds"])
    return Point(mix, runs, found)


def _memory(told: dict[str, float], own: Started | None) -> dict[str, int] | None:
    """Bytes: the peak of a server that was started here, else what a server of ours says it has now."""
    device = int(told.get("tokenmill_engine_device_memory_bytes", 0))
    if own is not None:
        return {"peak": own.peak_bytes(), "device": device}
    if engine := told.get("tokenmill_engine_memory_bytes"):
        return {"resident": int(engine), "device": device}
    return None
