"""Pictures of benchmarks: how latencies are distributed, throughput over time, latency against rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.bench.figures import Run, samples, tokens_over_time
from tokenmill.bench.plot import Series, chart
from tokenmill.bench.stats import percentile
from tokenmill.plan.demand.slo import Slo

SHORTEST = 1e-4  # seconds: what came together is drawn here, as nothing has no place on a logarithmic axis
SLICES = 60  # of a run, in the picture of its throughput
_RANKS = (*range(2, 90, 2), *range(90, 99), 99, 99.5, 99.9, 100)  # percent


def draw(folder: Path, named: Sequence[tuple[str, float | None, list[Run]]], promise: Slo | None) -> list[Path]:
    """`named`: what a point is called, its rate, its runs. Returns the files that were written."""
    pictures = {
        "ttft.svg": chart(
            "Time to first token: share of requests that had it", "ms", _distribution("ttft", named), logarithmic=True
        ),
        "itl.svg": chart(
            "Time between tokens: share of tokens that came by then",
            "ms",
            _distribution("itl", named),
            logarithmic=True,
        ),
        "throughput.svg": chart("Output tokens per second", "seconds since the start", _over_time(named)),
    }
    rates = [(rate, runs) for _, rate, runs in named if rate is not None]
    if len(rates) > 1:
        pictures["ttft_rate.svg"] = _against_rate("Time to first token, ms", "ttft", rates)
        pictures["itl_rate.svg"] = _against_rate("Time between tokens, ms", "itl", rates)
        pictures["goodput_rate.svg"] = _goodput(rates, promise)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (folder / name).write_text(text)
    return [folder / name for name in pictures]


def _distribution(which: str, named: Sequence[tuple[str, float | None, list[Run]]]) -> list[Series]:
    """Percent of values up to x, in milliseconds."""
    lines = []
    for name, _, runs in named:
        values = sorted(samples([answer for run in runs for answer in run.good])[which])
        points = [(1e3 * max(percentile(values, rank) or 0.0, SHORTEST), float(rank)) for rank in _RANKS if values]
        lines.append(Series(name, points))
    return lines


def _over_time(named: Sequence[tuple[str, float | None, list[Run]]]) -> list[Series]:
    width = max((run.seconds for _, _, runs in named for run in runs), default=1.0) / SLICES
    return [Series(name, tokens_over_time(runs, width)) for name, _, runs in named]


def _against_rate(title: str, which: str, rates: Sequence[tuple[float, list[Run]]]) -> str:
    lines = []
    for share in (50, 90, 99):
        points = []
        for rate, runs in rates:
            value = percentile(samples([answer for run in runs for answer in run.good])[which], share)
            points += [] if value is None else [(rate, 1e3 * value)]
        lines.append(Series(f"p{share}", points))
    return chart(title, "requests per second sent", lines)


def _goodput(rates: Sequence[tuple[float, list[Run]]], promise: Slo | None) -> str:
    def per_second(counts: Sequence[int], runs: list[Run]) -> float:
        return sum(counts) / sum(run.seconds for run in runs)

    done = Series("done", [(rate, per_second([len(run.good) for run in runs], runs)) for rate, runs in rates])
    if promise is None:
        return chart("Requests per second that ended well", "requests per second sent", [done])
    kept = [
        (rate, per_second([sum(answer.within(promise) for answer in run.answers) for run in runs], runs))
        for rate, runs in rates
    ]
    title = f"Requests per second within {promise.text}"
    return chart(title, "requests per second sent", [done, Series("within", kept)])
