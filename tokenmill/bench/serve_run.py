"""The whole of a load test: warm-up, repeats, one point after another, and what the server itself tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenmill.bench.achieved import Roof, work_of
from tokenmill.bench.figures import Run, of_point
from tokenmill.bench.serve import Check, Load, Watch, alone, compare, drive
from tokenmill.bench.serve_client import ServerAddress, run
from tokenmill.bench.serve_started import Started, counters
from tokenmill.bench.workloads import Mix
from tokenmill.plan.demand.slo import Slo

# Between repeats and between points: the prompts of each are other ones, so that no cache has them.
REPEAT_STRIDE, POINT_STRIDE = 1_000_003, 1_000_000_007

WatchOf = Callable[[str], Watch]  # what is under way -> whom to tell how far it is


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


_STEPS = "tokenmill_step_seconds_count"


def _memory(told: dict[str, float], own: Started | None) -> dict[str, int] | None:
    """Bytes: the peak of a server that was started here, else what a server of ours says it has now."""
    device = int(told.get("tokenmill_engine_device_memory_bytes", 0))
    if own is not None:
        return {"peak": own.peak_bytes(), "device": device}
    if engine := told.get("tokenmill_engine_memory_bytes"):
        return {"resident": int(engine), "device": device}
    return None
