"""`tokenmill bench serve`: the command line of the load test."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import bench_options as given
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.options import DEFAULT_MODEL, Model, option
from tokenmill.cli.terminal import note, progress
from tokenmill.config import LOAD, WHERE, EngineConfig
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.bench.achieved import Roof
    from tokenmill.bench.serve import Point
    from tokenmill.bench.workloads import Mix
    from tokenmill.plan.demand.slo import Slo

Watch = Callable[[int, int, float], None]  # ended, in all, output tokens per second lately

EVERY = 10.0  # seconds between lines where nobody watches a terminal
_WHEN = "When requests are sent"
_STREAMS = 64


@with_engine_options("serve", show=(WHERE, LOAD))
def serve(
    model: Model = DEFAULT_MODEL,
    url: Annotated[str | None, option("An OpenAI-compatible server; unset: MODEL is served here.")] = None,
    name: Annotated[str | None, option("With --url: what that server calls the model.")] = None,
    key: Annotated[str | None, option("With --url: an API key.")] = None,
    streams: Annotated[
        int | None, option(f"A new one when one ends: so many at once; unset: {_STREAMS}.", panel=_WHEN, min=1)
    ] = None,
    rate: Annotated[
        str | None,
        option("Requests per second at random times, whether others end or not; several: 1,2,4.", panel=_WHEN),
    ] = None,
    burstiness: Annotated[
        float, option("With --rate: 1 is Poisson, more comes in bursts, 0 is a clock.", panel=_WHEN)
    ] = 1.0,
    speed: Annotated[
        float | None, option("With --trace: at the trace's times, so many times as fast.", panel=_WHEN)
    ] = None,
    requests: Annotated[
        int | None, option(f"In all; unset: one per stream, or the whole trace, or {_STREAMS} at a --rate.", min=1)
    ] = None,
    input: given.Input = 128,
    output: given.Output = 128,
    trace: given.Trace = None,
    longest_input: given.LongestInput = None,
    longest_output: given.LongestOutput = None,
    ignore_eos: Annotated[bool, option("Ask for answers of full length.")] = True,
    seed: Annotated[
        int | None, option("For the same prompts and times again; unset: new ones, no cache has them.", min=0)
    ] = None,
    repeats: given.Repeats = 1,
    warmup: given.WarmUp = None,
    ceilings: given.Ceilings = True,
    check: Annotated[bool, option("Ask for every answer alone first, and compare word for word.", "--check")] = False,
    against_offline: Annotated[
        bool, option("What HTTP costs against the offline API, in turns.", "--against-offline")
    ] = False,
    rounds: Annotated[int, option("With --against-offline: how often both have their turn.", min=1)] = 5,
    timeout: Annotated[float, option("Seconds per request; who takes longer is counted.", min=0.1)] = 600.0,
    slo: Annotated[str | None, option("Promises, for goodput: ttft=500ms,itl=50ms,p=90.")] = None,
    price: given.Price = None,
    json: given.Json = None,
    plot: given.Plot = None,
    *,
    engine: EngineSettings,
) -> None:
    """Put load on a server and print throughput, latencies and errors.

    The client is independent of the server: any OpenAI-compatible one can be asked with --url. Where requests have
    times of their own (--rate, --speed), latencies count from the moment a request was due. Latencies are those of
    completed requests; how many timed out is told beside them.
    """
    from tokenmill.bench.cost import cost, parse_price
    from tokenmill.bench.serve import POINT_STRIDE, Load, LoadPlan, measure
    from tokenmill.bench.serve_client import ServerAddress
    from tokenmill.bench.serve_started import started_server
    from tokenmill.plan.demand.slo import parse_slo

    if url is not None and against_offline:
        raise ConfigError("--against-offline serves MODEL itself, so that both do the same work; leave --url out")
    if url is None and (name is not None or key is not None):
        raise ConfigError("--name and --key are for a server that runs already; name it with --url")
    if streams is not None and (rate is not None or speed is not None):
        other = "--rate" if rate is not None else "--speed"
        raise ConfigError(f"--streams sends a request when another ends, {other} at times of its own; give one of them")
    streams = streams or _STREAMS
    given.check_targets(json, plot)
    promise, per_hour = parse_slo(slo) if slo else None, parse_price(price)
    wanted = requests or (None if trace is not None else streams)
    work = given.workload(trace, wanted, input, output, longest_input, longest_output)
    mixes = _mixes(work, rate, burstiness, speed, trace)
    EngineConfig.from_options(model=model, **engine)  # what is wrong is told before a server is started
    seed = random.getrandbits(31) if seed is None else seed
    load = Load([], min(streams, len(work)), name, ignore_eos, timeout)
    if against_offline:
        _compare(model, engine, mixes[0], load, rounds, seed, json)
        return
    place = None if url is None else ServerAddress(url, key)  # what is wrong with it is told first
    plan = LoadPlan(repeats, min(8, streams) if warmup is None else warmup, check, promise, seed)
    roof = None if url is not None or not ceilings else _roof(model, engine)
    with ExitStack() as stack:
        if place is None:
            with progress() as report:
                report(0, 0, "starting the server")
                own = stack.enter_context(started_server(model, engine))
            place = ServerAddress(own.url, key)
        else:
            own = None
        watch = stack.enter_context(live())
        plans = (replace(plan, seed=seed + number * POINT_STRIDE) for number in range(len(mixes)))
        points = [measure(place, load, mix, one, watch, roof, own) for mix, one in zip(mixes, plans)]
    for point in points:
        point.figures["rate"] = point.mix.rate
        if per_hour is not None:
            point.figures["cost"] = cost(per_hour, point.figures)
    about = {"streams": load.streams, "burstiness": burstiness, "speed": speed, "seed": seed, "slo": slo}
    data: dict[str, Any] = {"url": url, "model": name or model, "workload": work.summary(), "load": about}
    data["points"] = [point.figures for point in points]
    given.give_out(data, _told(points, load.streams, promise), json)
    if plot is not None:
        _draw(plot, points, promise)
    if url is not None and any("connect" in point.figures["errors"] for point in points):
        note(f"{url} could not be reached; is a server running there?")
    checks = [(point.figures["check"], point.figures["requests"]) for point in points]
    differ = any(check is not None and check["equal"] != requests for check, requests in checks)
    if differ or any(point.figures["errors"] for point in points):
        raise typer.Exit(1)


def _mixes(work: Any, rate: str | None, burstiness: float, speed: float | None, trace: Path | None) -> list[Mix]:
    """One mix of requests and times per point."""
    from tokenmill.bench.workloads import Mix

    if speed is not None and trace is None:
        raise ConfigError("--speed is for the times of a trace; name one with --trace, or use --rate")
    if rate is None and burstiness != 1:
        raise ConfigError(f"--burstiness is {burstiness:g}, which is for random times; give --rate, too")
    if rate is None:
        return [Mix(work, speed=speed, burstiness=burstiness)]
    return [Mix(work, one, burstiness, speed) for one in given.numbers(rate, "rate", 1e-3)]


def _roof(model: str, options: dict[str, Any]) -> Roof:
    from tokenmill.bench.achieved import measure_roof

    with progress() as report:
        report(0, 0, "measuring what the machine can")
        return measure_roof(EngineConfig.from_options(model=model, **options))


def _compare(
    model: str, options: dict[str, Any], mix: Mix, load: Any, rounds: int, seed: int, json: Path | None
) -> None:
    from tokenmill.bench.serve_offline import overhead

    with progress() as report:
        measured = overhead(model, options, mix, load, rounds, seed, report)
    given.give_out({"overhead": measured.figures()}, list(measured.lines()), json)


def _told(points: list[Point], streams: int, promise: Slo | None) -> list[str]:
    from tokenmill.bench.table import against_rate, lines

    told: list[str] = []
    for point in points:
        how = f"{point.mix.told() or f'{streams} streams'}, {given.lengths(point.mix.work)}"
        told += [*([""] if told else []), *lines(point.figures, how, promise)]
    if len(points) > 1:
        told += ["", *against_rate([point.figures for point in points])]
    return told


def _draw(folder: Path, points: list[Point], promise: Slo | None) -> None:
    from tokenmill.bench.charts import draw

    named = [(point.mix.told() or "closed loop", point.mix.rate, point.runs) for point in points]
    note(f"wrote {', '.join(map(str, draw(folder, named, promise)))}")


@contextmanager
def live() -> Iterator[Callable[[str], Watch]]:
    """Yields what makes a watch for each thing that is under way."""
    with ExitStack() as bar:
        yield partial(_bar, bar) if sys.stderr.isatty() else _log()


def _bar(shown: ExitStack, what: str) -> Watch:
    """One bar, for what is under way now; it vanishes in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown.close()
    speed = TextColumn("{task.fields[speed]:,.0f} tokens/s")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), speed)
    progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None, speed=0.0)
    shown.enter_context(progress)
    return lambda done, total, speed: progress.update(task, completed=done, total=total, speed=speed)


def _log() -> Callable[[str], Watch]:
    """A plain line now and then."""
    told = time.monotonic()

    def tell(what: str, done: int, total: int, speed: float) -> None:
        nonlocal told
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            note(f"({done} of {total} {what}, {speed:,.0f} tokens/s)")

    return lambda what: partial(tell, what)
