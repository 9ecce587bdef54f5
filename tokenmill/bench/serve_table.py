"""What `tokenmill bench serve` prints and writes: throughput, percentiles, errors, the check and the overhead."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from tokenmill.bench.serve import Load, Result
from tokenmill.bench.serve_offline import Overhead

SHARES = (50, 90, 99)


def percentile(values: list[float], share: float) -> float | None:
    """The value that `share` percent of all are not above, interpolated; None where there are none."""
    if not values:
        return None
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(load: Load, result: Result) -> dict[str, Any]:
    """Everything about a load, as plain data; times in seconds."""
    good = [answer for answer in result.answers if answer.error is None]
    samples = {
        "ttft": [answer.times[0] for answer in good if answer.times],
        "itl": [after - before for answer in good for before, after in pairwise(answer.times)],
        "e2e": [answer.seconds for answer in good],
    }
    percentiles = {
        name: {f"p{share}": percentile(values, share) for share in SHARES} for name, values in samples.items()
    }
    return {
        "load": asdict(load),
        "seconds": result.seconds,
        "requests": len(result.answers),
        "completed": len(good),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "output_tokens": result.output_tokens,
        "output_tokens_per_second": result.output_tokens / result.seconds,
        "requests_per_second": len(good) / result.seconds,
        **percentiles,
        "errors": dict(result.errors),
        "messages": sorted({answer.message for answer in result.answers if answer.message})[:10],
        "check": None if result.check is None else asdict(result.check),
    }


def lines(found: dict[str, Any]) -> Iterable[str]:
    """The figures for a person."""
    load = found["load"]
    how = f"{load['streams']} streams" if load["rate"] is None else f"{load['rate']:g} requests/s at random times"
    yield f"{found['requests']} requests, {how}, answers of up to {load['max_tokens']} tokens: {found['seconds']:.1f} s"
    yield (
        f"throughput  {found['output_tokens_per_second']:.1f} output tokens/s, "
        f"{found['requests_per_second']:.2f} requests/s, {found['prompt_tokens']} prompt tokens"
    )
    yield " " * 12 + "".join(f"{f'p{share}':>10}" for share in SHARES)
    for name, title, unit in (("ttft", "TTFT ms", 1e3), ("itl", "ITL ms", 1e3), ("e2e", "E2E s", 1.0)):
        yield f"{title:<12}" + "".join(f"{_shown(found[name][f'p{share}'], unit):>10}" for share in SHARES)
    yield "errors      " + (", ".join(f"{count} x {kind}" for kind, count in found["errors"].items()) or "none")
    yield from (f"            {message}" for message in found["messages"])
    if (check := found["check"]) is not None:
        yield (
            f"check       {check['equal']} answers as alone, {check['lost']} lost, {check['mixed_up']} mixed up, "
            f"{check['different']} different"
        )


def overhead_figures(found: Overhead) -> dict[str, Any]:
    return {
        "served_tokens_per_second": found.served,
        "offline_tokens_per_second": found.offline,
        "overhead_percent": found.percent,
        "median_overhead_percent": found.median,
        "best_overhead_percent": found.best,
    }


def overhead_lines(found: Overhead) -> Iterable[str]:
    yield f"{'':12}{'served':>10}{'offline':>10}{'overhead':>10}   output tokens/s"
    for number, (served, offline, percent) in enumerate(zip(found.served, found.offline, found.percent), 1):
        yield f"round {number:<6}{served:>10.1f}{offline:>10.1f}{percent:>8.1f} %"
    served, offline = statistics.median(found.served), statistics.median(found.offline)
    yield f"{'median':<12}{served:>10.1f}{offline:>10.1f}{found.median:>8.1f} %"
    yield f"{'best':<12}{max(found.served):>10.1f}{max(found.offline):>10.1f}{found.best:>8.1f} %"


def _shown(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value * unit:.2f}"
