"""Comparisons: the same workload on clusters that differ in one thing, run side by side, as a table or a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tokenmill.bench.plot import Series, chart
from tokenmill.engine.scheduler.policy import Fcfs, Policy, ShortestFirst
from tokenmill.errors import ConfigError
from tokenmill.kv.eviction import EVICTION
from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.workload import Workload, percentile
from tokenmill.plan.simulator.cluster import ClusterSpec, Report
from tokenmill.plan.simulator.faults import Failures
from tokenmill.plan.simulator.result import SimulationResult
from tokenmill.plan.simulator.router import ROUTERS
from tokenmill.plan.simulator.simulate import simulate

BUDGETS = (256, 384, 512, 640, 768, 896, 1024, 2048, 8192)  # tokens per step
SPLITS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # shares of the replicas that only read prompts
TIERS = (0.0, 0.125, 0.25, 0.5, 1.0)  # of the host memory that was given
FAILURES = (None, 600.0, 120.0, 30.0)  # mean seconds between the failures of one replica


@dataclass(frozen=True)
class Variant:
    name: str
    spec: ClusterSpec
    workload: Workload
    x: float = 0.0  # where it stands in a chart


def variants(what: str, spec: ClusterSpec, workload: Workload, slo: Slo) -> list[Variant]:
    if what not in COMPARISONS:
        raise ConfigError(f"there is no comparison {what!r}; it may be one of {', '.join(COMPARISONS)}")
    return [Variant(name, one, workload, x) for name, one, x in COMPARISONS[what](spec, slo)]


Rows = Iterator[tuple[str, ClusterSpec, float]]


def _policies(spec: ClusterSpec, slo: Slo) -> Rows:
    one_class: dict[str, Callable[[], Policy]] = {  # the trace has no classes: nobody rises above another
        "fcfs": Fcfs,
        "sjf 10 s": partial(ShortestFirst, promote_after=None, patience=10.0),
        "sjf 60 s": partial(ShortestFirst, promote_after=None, patience=60.0),
        "sjf 600 s": partial(ShortestFirst, promote_after=None, patience=600.0),
        "sjf 60 s, no reserve": partial(ShortestFirst, promote_after=None, patience=60.0, reserve=False),
    }
    for name, policy in one_class.items():
        yield name, replace(spec, replica=replace(spec.replica, policy=policy)), 0.0


def _routers(spec: ClusterSpec, slo: Slo) -> Rows:
    for name in ROUTERS:
        yield name, replace(spec, router=name), 0.0


def _splits(spec: ClusterSpec, slo: Slo) -> Rows:
    if spec.replicas < 2:
        raise ConfigError("a split needs a replica for prompts and one for answers; give --replicas 2 or more")
    for share in SPLITS:
        prefill = min(round(share * spec.replicas), spec.replicas - 1)  # somebody has to decode
        name = f"{prefill} prefill, {spec.replicas - prefill} decode" if prefill else "together"
        yield name, replace(spec, prefill=prefill), share


def _failures(spec: ClusterSpec, slo: Slo) -> Rows:
    for mean in FAILURES:
        name = "none" if mean is None else f"each every {mean:,.0f} s"
        yield (
            name,
            replace(spec, failures=None if mean is None else Failures(mean, 60.0, spec.seed)),
            0.0 if mean is None else 3600 / mean,
        )


def _budgets(spec: ClusterSpec, slo: Slo) -> Rows:
    for budget in BUDGETS:
        if budget >= spec.replica.machine.max_rows:
            yield f"{budget} tokens", replace(spec, replica=spec.replica.with_limits(step_tokens=budget)), budget
    yield "controller", replace(spec, replica=spec.replica.led_by(slo)), 0.0


def _evictions(spec: ClusterSpec, slo: Slo) -> Rows:
    for name in EVICTION:
        yield name, replace(spec, replica=replace(spec.replica, eviction=name)), 0.0


def _tiers(spec: ClusterSpec, slo: Slo) -> Rows:
    most = spec.replica.host_memory
    if most is None:
        raise ConfigError("this compares sizes of the host memory up to one; give --kv-host-memory")
    for part in TIERS:
        memory = replace(most, bytes=int(most.bytes * part)) if part else None
        name = f"{most.bytes * part / 1e9:,.0f} GB of host memory" if part else "no host memory"
        yield name, replace(spec, replica=replace(spec.replica, host_memory=memory)), part


COMPARISONS = {
    "policies": _policies,
    "routers": _routers,
    "splits": _splits,
    "failures": _failures,
    "budgets": _budgets,
    "evictions": _evictions,
    "tiers": _tiers,
}


def run_variants(rows: Sequence[Variant], workers: int, report: Report) -> list[SimulationResult]:
    if workers == 1 or len(rows) == 1:
        return [simulate(case.spec, case.workload, _named(report, case.name)) for case in rows]
    found: list[SimulationResult] = []
    report(0, len(rows), "cases simulated")
    with ProcessPoolExecutor(workers) as pool:
        for number, outcome in enumerate(pool.map(simulate, [c.spec for c in rows], [c.workload for c in rows])):
            found.append(outcome)
            report(number + 1, len(rows), "cases simulated")
    return found


def _named(report: Report, name: str) -> Report:
    return lambda done, total, what: report(done, total, f"{name}: {what}")


HEAD = ("", "good/s", "good", "TTFT mean", "p99", "latency mean", "p99", "ITL p95", "p99", "cached", "busy", "preempt")
FAULTS = ("failures", "moved")  # where replicas failed at all


def table(rows: Sequence[tuple[str, SimulationResult]], slo: Slo) -> list[str]:
    """Markdown lines; seconds and milliseconds."""
    failed = any(outcome.failures for _, outcome in rows)
    head = HEAD + FAULTS if failed else HEAD
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, outcome in rows:
        f = outcome.figures(slo)
        if not outcome.served:
            lines.append(f"| {name} | nothing was served, {outcome.refused:,} refused |")
            continue
        cells = [
            name,
            f"{f['goodput']:.2f}",
            f"{f['good_share']:.1%}",
            f"{f['ttft_mean']:.2f} s",
            f"{f['ttft_p99']:.2f} s",
            f"{f['latency_mean']:.2f} s",
            f"{f['latency_p99']:.1f} s",
            f"{1e3 * f['itl_p95']:.1f} ms",
            f"{1e3 * f['itl_p99']:.1f} ms",
            f"{f['cached_share']:.1%}",
            f"{f['busy_share']:.0%}",
            f"{outcome.preemptions}",
            *((f"{outcome.failures:,}", f"{outcome.moved:,}") if failed else ()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


AXES = {
    "splits": "share of the replicas that only read prompts (0: none, all do both)",
    "failures": "failures per replica and hour",
    "budgets": "tokens per step (0: the controller)",
    "tiers": "share of the host memory",
}
PERCENTILES = (0.5, 0.75, 0.9, 0.95, 0.99)


def picture(what: str, rows: Sequence[Variant], outcomes: Sequence[SimulationResult], slo: Slo) -> str:
    """An SVG chart: good requests per second where the cases have an order, else first tokens by percentile."""
    if what in AXES:
        good = [(case.x, outcome.goodput(slo)) for case, outcome in zip(rows, outcomes)]
        first = [(case.x, outcome.figures(slo)["requests_per_second"]) for case, outcome in zip(rows, outcomes)]
        lines = [Series("good", sorted(good)), Series("all", sorted(first))]
        return chart(f"Requests per second, {slo.text}", AXES[what], lines)
    lines = []
    for case, outcome in zip(rows, outcomes):
        ttfts = [one.ttft for one in outcome.served]
        lines.append(Series(case.name, [(100 * share, percentile(ttfts, share)) for share in PERCENTILES]))
    return chart(f"Seconds to the first token, {rows[0].workload.name}", "percentile of requests", lines)
