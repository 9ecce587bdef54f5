"""Replays a trace on the real engine and in the simulator, whose cost is fitted to this machine, and compares both.

    python scripts/replay_check.py TRACE [--requests 200] [--rate 2] [--shrink 1] [--model default]

The first requests of the trace come at the given rate, with prompts of random tokens (equal where the trace says that
prompts are equal), clipped to the model's length. The cost is fitted to steps of other requests, measured before and
after the replay, so that a machine that became slower meanwhile is seen as it was on average.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.build import build
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.scheduler.policy import Fcfs
from tokenmill.engine.step import Facts, facts_of
from tokenmill.params import SamplingParams
from tokenmill.plan.cluster import ClusterSpec
from tokenmill.plan.queueing import Slo
from tokenmill.plan.replica import ReplicaSpec
from tokenmill.plan.simulate import prompt_tokens, simulate
from tokenmill.plan.step_cost import Machine, fit_linear, relative_error
from tokenmill.plan.traces import read_trace
from tokenmill.plan.workload import Workload, percentile

GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
# Rows at once and prompt lengths of the requests that the cost is fitted to.
PROBES = ((1, 16), (1, 300), (1, 900), (4, 64), (4, 200), (8, 100), (16, 40), (16, 120))


class Watch:
    """Times the steps of an engine as they pass; the device has them one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[tuple[Facts, float]] = []
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


def make_request(id: str, prompt: list[int], output: int, arrival: float) -> Request:
    return Request(id, prompt, GREEDY, max_tokens=output, seed=0, arrival=arrival)


def calibrate(watch: Watch, vocab: int, source: random.Random) -> list[tuple[Facts, float]]:
    """Steps of small crowds of several sizes."""
    engine, first = watch.engine, len(watch.steps)
    for rows, length in PROBES:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths, and the blocks of prefix hashes")
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    config = EngineConfig(model=chosen.model, policy="fcfs", max_model_len=chosen.max_model_len)
    built = build(config)
    engine, settings, vocab = built.engine, built.settings, built.spec.vocab_size
    work = clipped(read_trace(chosen.trace, chosen.requests, chosen.rate), settings.max_len - 1, chosen.shrink)
    print(work.summary(), flush=True)
    watch, source = Watch(engine), random.Random(chosen.seed)
    calibrate(watch, vocab, source)  # warm
    steps = calibrate(watch, vocab, source)
    print(f"{len(steps)} steps measured; replaying", flush=True)
    engine.reset_prefix_cache()
    first = len(watch.steps)
    requests, seconds = replay(watch, work, vocab)
    during = watch.steps[first:]
    steps += calibrate(watch, vocab, source)
    cost = fit_linear(steps)
    print(f"cost {cost}\n  off by {relative_error(cost, steps):.1%} on its own {len(steps)} steps, ", end="")
    print(f"by {relative_error(cost, during):.1%} on the replay's {len(during)}")
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
    outcome = simulate(ClusterSpec(ReplicaSpec(machine, settings.block_size, policy=Fcfs)), work)
    told = outcome.figures(Slo())
    ttfts = [one.metrics.ttft or 0.0 for one in requests]
    real = {
        "output tokens/s": sum(one.num_output for one in requests) / seconds,
        "TTFT mean, s": sum(ttfts) / len(ttfts),
        "TTFT p95, s": percentile(ttfts, 0.95),
        "latency mean, s": sum((one.metrics.finished or 0.0) - one.arrival for one in requests) / len(requests),
        "cached share": sum(one.metrics.cached_tokens for one in requests) / sum(work.prompts),
    }
    names = ("output_tokens_per_second", "ttft_mean", "ttft_p95", "latency_mean", "cached_share")
    print("| | engine | simulator | simulator / engine |\n|---|---|---|---|")
    for (name, value), key in zip(real.items(), names):
        ratio = f"{told[key] / value:.2f}" if value else "-"
        print(f"| {name} | {value:.4g} | {told[key]:.4g} | {ratio} |")
    engine.close()


if __name__ == "__main__":
    main()
