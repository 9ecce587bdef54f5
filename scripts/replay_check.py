"""Replays a trace on the real engine and in the simulator, whose cost is fitted to this machine, and compares both.

    python scripts/replay_check.py TRACE [--requests 200] [--rate 2] [--shrink 1] [--repeats 1] [--model default]

The first requests of the trace come at the given rate, with prompts of random tokens (equal where the trace says that
prompts are equal), clipped to the model's length. The cost is fitted to steps of other requests, measured before and
after the replay, so that a machine that became slower meanwhile is seen as it was on average.

A second simulation has steps that are as slow as the engine's were at that moment of the replay. It is no prediction:
where it agrees with the engine and the first does not, the difference is in the times of steps, and neither in the
scheduling nor in what happens between steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.build import build
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.scheduler.policy import Fcfs
from tokenmill.params import SamplingParams
from tokenmill.plan.demand.slo import Slo
from tokenmill.plan.demand.traces import read_trace
from tokenmill.plan.demand.workload import Workload, percentile
from tokenmill.plan.simulator.cluster import Cluster, ClusterSpec
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import jobs_of, prompt_tokens
from tokenmill.step_time import Facts, FittedStepTime, LinearStepTime, StepTimeModel, facts_of

FIGURES = {
    "output tokens/s": "output_tokens_per_second",
    "TTFT mean, s": "ttft_mean",
    "TTFT p50, s": "ttft_p50",
    "TTFT p95, s": "ttft_p95",
    "latency mean, s": "latency_mean",
    "cached share": "cached_share",
}
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
# Rows at once and prompt lengths of the requests that the cost is fitted to.
PROBES = ((1, 16), (1, 300), (1, 900), (4, 64), (4, 200), (8, 100), (16, 40), (16, 120))
ROUNDS = 3  # of them on each side of a replay: a machine's speed may change by the second
NEAR, FEWEST = 0.1, 2  # seconds; steps


class Watch:
    """Times the steps of an engine as they pass; the device has them one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[tuple[Facts, float]] = []
        self.moments: list[float] = []  # at which they began
        self.seen: Facts | None = None
        launch = engine.runner.launch

        def watched(step):  # type: ignore[no-untyped-def]
            self.seen = facts_of(step)
            return launch(step)

        engine.runner.launch = watched  # type: ignore[method-assign]

    def step(self) -> None:
        """One turn, timed whole: what the host does between steps is part of their price."""
        self.seen = None
        began = time.perf_counter()
        self.engine.step()
        if self.seen is not None:
            self.steps.append((self.seen, time.perf_counter() - began))
            self.moments.append(began)


class AsItWas:
    """A cost, times how slow the machine was at that moment of a replay: the steps begun NEAR it, over their cost."""

    def __init__(self, cost: StepTimeModel, steps: list[tuple[Facts, float]], moments: list[float]) -> None:
        self.cost = cost
        self.clock: Callable[[], float] = lambda: 0.0  # of the simulation
        self._moments = moments  # seconds after the replay began
        self._spent = list(accumulate((one for _, one in steps), initial=0.0))
        self._told = list(accumulate((cost.seconds(facts) for facts, _ in steps), initial=0.0))

    def seconds(self, facts: Facts) -> float:
        first, last = (bisect_left(self._moments, self.clock() + off) for off in (-NEAR, NEAR))
        if last - first < FEWEST:
            first, last = max(0, first - FEWEST), min(len(self._moments), last + FEWEST)
        slow = (self._spent[last] - self._spent[first]) / (self._told[last] - self._told[first])
        return slow * self.cost.seconds(facts)


def make_request(id: str, prompt: list[int], output: int, arrival: float) -> Request:
    return Request(id, prompt, GREEDY, max_tokens=output, seed=0, arrival=arrival)


def calibrate(watch: Watch, vocab: int, source: random.Random) -> list[tuple[Facts, float]]:
    """Steps of small crowds of several sizes."""
    engine, first = watch.engine, len(watch.steps)
    for rows, length in PROBES * ROUNDS:
        for number in range(rows):
            prompt = [source.randrange(vocab) for _ in range(length + number)]
            engine.add(make_request(f"c{rows}-{length}-{number}", prompt, 12, engine.clock()))
        while engine.has_work:
            watch.step()
    return watch.steps[first:]


def replay(watch: Watch, work: Workload, vocab: int) -> tuple[list[Request], float]:
    """Every request at its time; returns them with their times, and how long it took."""
    engine = watch.engine
    colours = random.Random(1)
    base: dict[int, int] = {}
    requests: list[Request] = []
    start = engine.clock()
    while len(requests) < len(work) or engine.has_work:
        now = engine.clock() - start
        while len(requests) < len(work) and work.arrivals[len(requests)] <= now:
            number = len(requests)
            # One number of the simulator's prompt is one random token here; they follow each other, so that the
            # model does not see one token a hundred times.
            ids = prompt_tokens(work, number)
            prompt = [(base.setdefault(id, colours.randrange(vocab)) + at) % vocab for at, id in enumerate(ids)]
            request = make_request(str(number), prompt, work.outputs[number], start + work.arrivals[number])
            requests.append(request)
            engine.add(request)
        if engine.has_work:
            watch.step()
        else:
            time.sleep(max(0.0, work.arrivals[len(requests)] - (engine.clock() - start)))
    return requests, engine.clock() - start


def clipped(work: Workload, longest: int, shrink: int) -> Workload:
    """Lengths divided by `shrink`, and prompts cut so that prompt and answer fit."""
    outputs = tuple(min(max(1, one // shrink), longest // 2) for one in work.outputs)
    prompts = tuple(min(max(1, one // shrink), longest - out) for one, out in zip(work.prompts, outputs))
    return replace(work, prompts=prompts, outputs=outputs, hash_block=max(1, work.hash_block // shrink))


def measured(requests: list[Request], seconds: float) -> dict[str, float]:
    """The simulator's figures, of the engine's requests."""
    ttfts = [one.metrics.ttft or 0.0 for one in requests]
    latencies = [(one.metrics.finished or 0.0) - one.arrival for one in requests]
    return {
        "output_tokens_per_second": sum(one.num_output for one in requests) / seconds,
        "ttft_mean": statistics.fmean(ttfts),
        "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p95": percentile(ttfts, 0.95),
        "latency_mean": statistics.fmean(latencies),
        "cached_share": sum(one.metrics.cached_tokens for one in requests) / sum(one.prompt_len for one in requests),
    }


def fitted(steps: list[tuple[Facts, float]]) -> LinearStepTime:
    model = FittedStepTime(forgetting=1.0)
    for facts, seconds in steps:
        model.learn(facts, seconds)
    return model.linear


def relative_error(cost: StepTimeModel, steps: list[tuple[Facts, float]]) -> float:
    """Mean over steps of |predicted - measured| / measured."""
    return statistics.fmean(abs(cost.seconds(facts) - seconds) / seconds for facts, seconds in steps)


Told = dict[str, float]
SimulatedAt = Callable[[StepTimeModel], Told]


def compare(watch: Watch, work: Workload, vocab: int, source: random.Random, told: SimulatedAt) -> tuple[Told, ...]:
    """One replay: what the engine did, what the simulator says, and what it says with the steps as they were."""
    steps = calibrate(watch, vocab, source)
    watch.engine.reset_prefix_cache()
    first = len(watch.steps)
    began = time.perf_counter()
    requests, seconds = replay(watch, work, vocab)
    during, moments = watch.steps[first:], [at - began for at in watch.moments[first:]]
    steps += calibrate(watch, vocab, source)
    cost = fitted(steps)
    spent = sum(one for _, one in during) / sum(cost.seconds(facts) for facts, _ in during)
    print(f"cost {cost}\n  off by {relative_error(cost, steps):.1%} on its own {len(steps)} steps, ", end="")
    print(f"by {relative_error(cost, during):.1%} on the replay's {len(during)}; they took {spent:.2f} of what it says")
    return measured(requests, seconds), told(cost), told(AsItWas(cost, during, moments))


def table(rows: list[tuple[Told, ...]]) -> list[str]:
    """A line per figure and repeat; then, for several, the medians of the ratios and their range."""
    lines = ["| | engine | simulator | ratio | with steps as they were | ratio |", "|---|---|---|---|---|---|"]
    for name, key in FIGURES.items():
        found = [[one[key] for one in row] for row in rows]
        for real, told, own in found:
            first, second = (f"{one / real:.2f}" if real else "-" for one in (told, own))
            lines.append(f"| {name} | {real:.4g} | {told:.4g} | {first} | {own:.4g} | {second} |")
        if len(rows) > 1 and all(real for real, *_ in found):
            ratios = zip(*((told / real, own / real) for real, told, own in found))
            first, second = (f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in ratios)
            lines.append(f"| **{name}, all** | | | {first} | | {second} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, and the blocks of prefix hashes")
    parser.add_argument("--repeats", type=int, default=1, help="how often all of it is measured")
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    config = EngineConfig(model=chosen.model, policy="fcfs", max_model_len=chosen.max_model_len)
    built = build(config)
    engine, settings, vocab = built.engine, built.settings, built.spec.vocab_size
    work = clipped(read_trace(chosen.trace, chosen.requests, chosen.rate), settings.max_len - 1, chosen.shrink)
    print(work.summary(), flush=True)

    def told(cost: StepTimeModel) -> Told:
        machine = Machine(
            "here",
            cost,
            gpus=1,
            kv_tokens=settings.num_blocks * settings.block_size,
            kv_bytes=1,
            max_rows=settings.max_rows,
            step_tokens=settings.max_step_tokens,
            overlap=bool(engine._depth),
        )
        replica = ReplicaSpec(machine, settings.block_size, policy=Fcfs, leaps=not isinstance(cost, AsItWas))
        cluster = Cluster(ClusterSpec(replica), lambda job: prompt_tokens(work, job.number))
        if isinstance(cost, AsItWas):
            cost.clock = lambda: cluster.replicas[0].now
        return cluster.run(jobs_of(work)).figures(Slo())

    watch, source = Watch(engine), random.Random(chosen.seed)
    calibrate(watch, vocab, source)  # warm
    rows = [compare(watch, work, vocab, source, told) for _ in range(chosen.repeats)]
    print("\n".join(table(rows)))
    engine.close()


if __name__ == "__main__":
    main()
