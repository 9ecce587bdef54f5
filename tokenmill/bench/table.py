"""What benchmarks print: throughput with its interval, latencies, promises, machine, memory, price and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenmill.bench.stats import SHARES, Interval
from tokenmill.plan.demand.slo import Slo

COLUMNS = ("mean", *(f"p{share}" for share in SHARES))
LATENCIES = (("ttft", "TTFT ms", 1e3), ("tpot", "TPOT ms", 1e3), ("itl", "ITL ms", 1e3), ("e2e", "E2E s", 1.0))
LATE = 0.01  # seconds: a client that sends so much later than it meant to is worth a word


def lines(found: dict[str, Any], how: str, promise: Slo | None = None) -> Iterator[str]:
    """One point for a person; `how` says how the requests were sent."""
    repeats = len(found["repeats"])
    over = "" if repeats == 1 else f" in {repeats} repeats"
    yield f"{found['requests']} requests{over}, {how}: {found['seconds']:.1f} s"
    interval = found["interval"]["output_tokens_per_second"]
    yield (
        f"throughput  {found['output_tokens_per_second']:.1f} output tokens/s{_between(interval, 1.0, ' (', ')')}, "
        f"{found['total_tokens_per_second']:.1f} tokens/s in all, {found['requests_per_second']:.2f} requests/s"
    )
    cached = f" ({found['cached_tokens']:,} of them from the cache)" if found["cached_tokens"] else ""
    yield f"tokens      {found['prompt_tokens']:,} of prompts{cached}, {found['output_tokens']:,} of answers"
    yield f"latencies   of {found['completed']} completed requests; timed out: {found['timed_out']}"
    known = any(found["interval"][f"{name}.mean"] is not None for name, _, _ in LATENCIES)
    yield " " * 12 + "".join(f"{name:>10}" for name in COLUMNS) + ("   95 % of the mean" if known else "")
    for name, title, unit in LATENCIES:
        cells = "".join(f"{_shown(found[name][column], unit):>10}" for column in COLUMNS)
        yield f"{title:<12}{cells}{_between(found['interval'][f'{name}.mean'], unit, '   ')}"
    if (late := found["late"]["p99"]) is not None and late > LATE:
        yield f"client      1 % were sent {1e3 * late:.0f} ms late or later; their times count from when they were due"
    if promise is not None and "goodput" in found:
        good = found["goodput"]
        yield f"goodput     {good['requests_per_second']:.2f} requests/s ({good['share']:.0%}) within {promise.text}"
    if achieved := found.get("achieved"):
        yield f"achieved    {achieved_text(achieved)}"
    if memory := found.get("memory"):
        yield f"memory      {_memory(memory)}"
    if cost := found.get("cost"):
        yield f"cost        {_cost(cost)}"
    yield "errors      " + (", ".join(f"{count} x {kind}" for kind, count in found["errors"].items()) or "none")
    yield from (f"            {message}" for message in found["messages"])
    if (check := found.get("check")) is not None:
        yield (
            f"check       {check['equal']} answers as alone, {check['lost']} lost, {check['mixed_up']} mixed up, "
            f"{check['different']} different"
        )


def against_rate(points: Sequence[dict[str, Any]]) -> Iterator[str]:
    promised = any("goodput" in point for point in points)
    slow = any(point["timed_out"] for point in points)
    heads = ["rate/s", "done/s", "out tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99 ms"]
    heads += (["goodput/s"] if promised else []) + (["timed out"] if slow else [])
    yield "".join(f"{head:>11}" for head in heads)
    for point in points:
        cells = [
            f"{point['rate']:g}",
            f"{point['requests_per_second']:.2f}",
            f"{point['output_tokens_per_second']:.1f}",
        ]
        cells += [_shown(point[name][share], 1e3) for name in ("ttft", "itl") for share in ("p50", "p99")]
        cells += [f"{point['goodput']['requests_per_second']:.2f}"] if promised else []
        cells += [f"{point['timed_out']}"] if slow else []
        yield "".join(f"{cell:>11}" for cell in cells)


def achieved_text(achieved: dict[str, Any]) -> str:
    return (
        f"{achieved['bytes_per_second'] / 1e9:.3g} GB/s ({achieved['bytes_share']:.0%} of the measured "
        f"{achieved['bytes_ceiling'] / 1e9:.3g}), {achieved['flops_per_second'] / 1e12:.3g} TFLOP/s "
        f"({achieved['flops_share']:.0%} of {achieved['flops_ceiling'] / 1e12:.3g}), "
        f"{achieved['steps']:,} steps on {achieved['device']}"
    )


def _memory(memory: dict[str, int]) -> str:
    device = f", {memory['device'] / 1e6:,.0f} MB on the device" if memory["device"] else ""
    if "peak" in memory:
        return f"{memory['peak'] / 1e6:,.0f} MB at its peak{device}"
    return f"{memory['resident'] / 1e6:,.0f} MB in the engine now{device}"


def _cost(cost: dict[str, float | None]) -> str:
    each, answers = cost["per_million_tokens"], cost["per_million_output_tokens"]
    if each is None or answers is None:
        return "nothing was answered"
    return f"{each:.4g} per million tokens, {answers:.4g} per million of answers alone, at {cost['price_per_hour']:g}/h"


def _between(interval: Interval | None, unit: float, before: str, after: str = "") -> str:
    return "" if interval is None else f"{before}{_shown(interval[0], unit)} to {_shown(interval[1], unit)}{after}"


def _shown(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value * unit:.2f}"
