"""The figures of a benchmark: what became of each request, summed up over requests and over repeats."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tokenmill.bench.stats import Interval, over_repeats, resampled, spread
from tokenmill.plan.demand.slo import Slo

LATENCIES = ("ttft", "tpot", "itl", "e2e")
# Errors that say that time ran out: the client's own limit, a server's, or a deadline that the engine kept.
TIMEOUTS = ("timeout", "status 408", "status 504", "deadline_exceeded", "deadline")
RATES = ("output_tokens_per_second", "total_tokens_per_second", "requests_per_second")


@dataclass
class Answer:
    """What became of one request. Times are seconds since it was meant to be sent, late as it may have been."""

    seconds: float
    text: str = ""
    times: list[float] = field(default_factory=list)  # of every event with text, or of every token
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    start: float = 0.0  # when it was meant to be sent, in seconds after the run began
    late: float = 0.0  # how much later it was sent
    error: str | None = None  # its kind: how the connection failed, the status, the error's code, or "no end"
    message: str = ""  # what the server said about it

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; an event may carry several tokens, so this is not the mean gap."""
        count = self.output_tokens - 1
        return (self.times[-1] - self.times[0]) / count if count > 0 and len(self.times) > 1 else None

    def within(self, promise: Slo) -> bool:
        """Whether this one got what was promised: its first token in time, and that share of the others."""
        if self.error is not None or not self.times or self.times[0] > promise.ttft:
            return False
        gaps = self.gaps
        return sum(gap <= promise.itl for gap in gaps) >= promise.share * len(gaps)


@dataclass
class Run:
    """One repeat: the answers, and how long all of it took."""

    seconds: float
    answers: list[Answer]

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> Counter[str]:
        return Counter(answer.error for answer in self.answers if answer.error is not None)

    @property
    def timed_out(self) -> int:
        return sum(self.errors[kind] for kind in TIMEOUTS)

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.good)  # as prompts: what broke off is no throughput


def samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        "ttft": [answer.times[0] for answer in answers if answer.times],
        "tpot": [answer.tpot for answer in answers if answer.tpot is not None],
        "itl": [gap for answer in answers for gap in answer.gaps],
        "e2e": [answer.seconds for answer in answers],
    }


def of_run(run: Run, promise: Slo | None = None) -> dict[str, Any]:
    """One repeat as plain data; times in seconds."""
    good = run.good
    prompt = sum(answer.prompt_tokens for answer in good)
    found: dict[str, Any] = {
        "seconds": run.seconds,
        "requests": len(run.answers),
        "completed": len(good),
        "timed_out": run.timed_out,
        "prompt_tokens": prompt,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens": run.output_tokens,
        "output_tokens_per_second": run.output_tokens / run.seconds,
        "total_tokens_per_second": (prompt + run.output_tokens) / run.seconds,
        "requests_per_second": len(good) / run.seconds,
        "latencies_of": "completed requests",  # who waited longest may be among the others
        **{name: spread(values) for name, values in samples(good).items()},
        "late": spread([answer.late for answer in run.answers]),
    }
    if promise is not None:
        kept = sum(answer.within(promise) for answer in run.answers)
        found["goodput"] = {"share": kept / len(run.answers), "requests_per_second": kept / run.seconds}
    return found


def of_point(runs: Sequence[Run], promise: Slo | None = None, *, apart: bool = True) -> dict[str, Any]:
    """All repeats of one load: sums and percentiles over all requests, speeds averaged, intervals, every repeat.

    apart: requests came one by one, so that those of one run tell something of the next. Those of a batch share its
    steps, and do not.
    """
    whole = Run(sum(run.seconds for run in runs), [answer for run in runs for answer in run.answers])
    repeats = [of_run(run, promise) for run in runs]
    errors = whole.errors
    return {
        **of_run(whole, promise),
        "interval": intervals(runs, repeats, apart),
        "errors": dict(errors),
        "messages": sorted({answer.message for answer in whole.answers if answer.message})[:10],
        "repeats": repeats,
    }


def intervals(runs: Sequence[Run], repeats: Sequence[dict[str, Any]], apart: bool) -> dict[str, Interval | None]:
    """95 %: over repeats where there are several; else latencies by drawing requests again, if they came apart."""
    found: dict[str, Interval | None] = {name: over_repeats([one[name] for one in repeats]) for name in RATES}
    for name in LATENCIES:
        for kind in ("mean", "p50", "p90", "p99"):
            values = [one[name][kind] for one in repeats if one[name][kind] is not None]
            single = len(runs) == 1 and apart and kind == "mean"  # a tail drawn from itself knows nothing beyond itself
            found[f"{name}.{kind}"] = resampled(runs[0].good, _mean_of(name)) if single else over_repeats(values)
    return found


def tokens_over_time(runs: Sequence[Run], width: float) -> list[tuple[float, float]]:
    """Output tokens per second against the seconds since the start, averaged over repeats and over `width` seconds.

    An answer's tokens are spread evenly over its events.
    """
    counts: Counter[int] = Counter()
    for run in runs:
        for answer in run.good:
            for at in answer.times:
                counts[int((answer.start + at) / width)] += answer.output_tokens / len(answer.times)  # type: ignore[assignment]
    last = max(counts, default=0)
    return [((place + 0.5) * width, counts[place] / width / len(runs)) for place in range(last + 1)]


def _mean_of(name: str) -> Callable[[Sequence[Answer]], float | None]:
    def figure(answers: Sequence[Answer]) -> float | None:
        values = samples(answers)[name]
        return statistics.fmean(values) if values else None

    return figure
