"""`tokenmill simulate`: what a fleet would do with a load, from the real scheduler over a model of step times."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.options import option
from tokenmill.cli.terminal import EVERY, check_writable, note, progress
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.plan.simulator.autoscale import Autoscale


def simulate(
    trace: Annotated[Path, typer.Argument(help="Azure CSV, Mooncake JSON lines or ShareGPT JSON.")],
    machine: Annotated[str, option("What one replica is: h200-8b, h200x4-70b, cpu-135m.")] = "h200-8b",
    replicas: Annotated[int, option("Copies of the model.", min=1)] = 1,
    requests: Annotated[int | None, option("The first so many of the trace.", min=1)] = None,
    rate: Annotated[float | None, option("Requests per second: gaps are stretched.", min=0.001)] = None,
    seconds: Annotated[
        float | None, option("With --rate: overlay copies of the trace instead, for so many seconds.", min=1)
    ] = None,
    router: Annotated[str, option("random, round-robin, least-loaded, prefix-aware, cache-aware.")] = "least-loaded",
    policy: Annotated[str, option("fcfs, priority, sjf.")] = "fcfs",
    eviction: Annotated[str, option("Which cached block goes first: lru, lfu, cost, learned.")] = "lru",
    kv_host_memory: Annotated[
        float | None, option("GB of host memory beside each replica, as a tier of KV.", min=0.001)
    ] = None,
    host_link: Annotated[float, option("GB/s between a replica and its host memory, each way.", min=0.001)] = 50.0,
    prefill: Annotated[int, option("Replicas that only read prompts; the others decode.", min=0)] = 0,
    link: Annotated[float, option("GB/s out of one prefill replica.", min=0.1)] = 50.0,
    fail_every: Annotated[float | None, option("Mean seconds between failures of one replica.", min=1)] = None,
    repair: Annotated[float, option("Seconds until a failed replica is back.", min=0)] = 60.0,
    autoscale: Annotated[
        str | None, option("LEAST:MOST:PER, replicas and requests per replica, such as 4:64:32.")
    ] = None,
    startup: Annotated[float, option("Seconds until a new replica takes work.", min=0)] = 60.0,
    rows: Annotated[int | None, option("Requests that run at once on a replica.", min=1)] = None,
    step_tokens: Annotated[int | None, option("Tokens per step of a replica.", min=1)] = None,
    speculation: Annotated[
        str | None, option("ACCEPTANCE:DRAFTS, how often a draft holds and how many a row verifies, such as 0.8:4.")
    ] = None,
    controller: Annotated[bool, option("Lead tokens per step by --slo.", "--controller")] = False,
    block_size: Annotated[int, option("Tokens per KV block; larger is simulated faster.", min=1)] = 16,
    slo: Annotated[str, option("What makes a request good.")] = "ttft=2s,itl=100ms",
    compare: Annotated[
        str | None, option("Vary one thing: policies, routers, splits, failures, budgets, evictions, tiers.")
    ] = None,
    then: Annotated[
        Path | None, option("A second trace: the load shifts to it, then to both; --rate is FIRST.")
    ] = None,
    then_rate: Annotated[float, option("The second trace's requests per second.", min=0.001)] = 1.0,
    workers: Annotated[int, option("Processes for the cases of --compare.", min=1)] = 1,
    seed: Annotated[int, option("Other random choices.")] = 0,
    plot: Annotated[Path | None, option("A chart of the cases (SVG).")] = None,
    out: Annotated[Path | None, option("Write every figure to this file (JSON).", "--out", "-o")] = None,
) -> None:
    """Replay a trace on replicas that are a cost model under the real scheduler, memory and prefix cache."""
    from tokenmill.engine.scheduler.policy import POLICIES
    from tokenmill.engine.speculation.proposer import MAX_DRAFTS
    from tokenmill.kv.eviction import EVICTION
    from tokenmill.plan.demand.slo import parse_slo
    from tokenmill.plan.demand.traces import read_trace
    from tokenmill.plan.simulator.cluster import ClusterSpec
    from tokenmill.plan.simulator.compare import Variant, picture, run_variants, table, variants
    from tokenmill.plan.simulator.faults import Failures
    from tokenmill.plan.simulator.host_memory import HostMemory
    from tokenmill.plan.simulator.machines import machine_named
    from tokenmill.plan.simulator.replica import ReplicaSpec
    from tokenmill.plan.simulator.simulate import crowd, shifting
    from tokenmill.plan.solve.drafts import parse_drafts

    check_writable(plot, out)
    if policy not in POLICIES:
        raise ConfigError(f"there is no policy {policy!r}; it may be one of {', '.join(POLICIES)}")
    if eviction not in EVICTION:
        raise ConfigError(f"there is no eviction {eviction!r}; it may be one of {', '.join(EVICTION)}")
    if seconds is not None and rate is None:
        raise ConfigError("--seconds overlays copies of the trace until --rate is reached; give both")
    if not prefill < replicas:
        raise ConfigError(f"--prefill is {prefill} of {replicas} replicas: nobody is left to decode")
    promise, drafts = parse_slo(slo), parse_drafts(speculation, MAX_DRAFTS)
    work = read_trace(trace, requests)
    if then is not None:
        if rate is None or seconds is None:
            raise ConfigError("--then needs --rate and --seconds")
        work = shifting(work, read_trace(then), seconds, (rate, then_rate))
    elif rate is not None:
        work = crowd(work, rate, seconds, seed) if seconds is not None else work.at_rate(rate)
    one = ReplicaSpec(
        machine_named(machine),
        block_size=block_size,
        policy=POLICIES[policy],
        prefix_caching=work.hash_ids is not None or prefill > 0 or compare == "splits",
        drafts=drafts,
        eviction=eviction,
        host_memory=None if kv_host_memory is None else HostMemory(int(kv_host_memory * 1e9), host_link * 1e9),
    ).with_limits(rows, step_tokens)
    if controller:
        one = one.led_by(promise)
    spec = ClusterSpec(
        one,
        replicas,
        router=router,
        prefill=prefill,
        link_bytes=link * 1e9,
        failures=Failures(fail_every, repair, seed) if fail_every is not None else None,
        autoscale=_autoscale(autoscale, startup),
        seed=seed,
    )
    note(work.summary())
    note(one.machine.line())
    began = time.monotonic()
    rows_of = variants(compare, spec, work, promise) if compare else [Variant(policy, spec, work)]
    with progress(every=EVERY) as report:
        outcomes = run_variants(rows_of, workers, report)
    names = [case.name for case in rows_of]
    typer.echo("\n".join(table(list(zip(names, outcomes)), promise)))
    for name, outcome in zip(names, outcomes):
        for level, share in outcome.coverage.items():
            note(f"{name}: {share:.1%} of answers stayed within their predicted p{100 * level:g}")
    steps = sum(outcome.steps for outcome in outcomes)
    note(f"{steps:,} steps of {replicas:,} replicas in {time.monotonic() - began:.1f} s")
    if out is not None:
        figures = {name: outcome.figures(promise) for name, outcome in zip(names, outcomes)}
        out.write_text(json.dumps(figures, indent=1) + "\n")
        note(f"wrote {out}")
    if plot is not None:
        plot.write_text(picture(compare or "", rows_of, outcomes, promise))
        note(f"wrote {plot}")


def _autoscale(text: str | None, startup: float) -> Autoscale | None:
    from tokenmill.plan.simulator.autoscale import autoscale_from

    return None if text is None else autoscale_from(text, startup)
