"""Simulations: workloads become jobs, clusters serve them, and comparisons vary one thing at a time."""

from __future__ import annotations

import random
from dataclasses import replace

from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.simulator.cluster import Cluster, ClusterSpec, Report
from tokenmill.plan.simulator.replica import OUTPUT, SimulatedJob
from tokenmill.plan.simulator.result import SimulationResult


def jobs_of(workload: Workload) -> list[SimulatedJob]:
    """Jobs, their prompts not made yet."""
    columns = zip(workload.arrivals, workload.prompts, workload.outputs)
    return [SimulatedJob(number, at, [], prompt, output) for number, (at, prompt, output) in enumerate(columns)]


def prompt_tokens(workload: Workload, number: int) -> list[int]:
    """Made-up tokens that are equal exactly where the trace says that prompts are: a prefix cache sees real sharing."""
    length = workload.prompts[number]
    if workload.hash_ids is None:
        return [OUTPUT + number] * length
    tokens: list[int] = []
    for id in workload.hash_ids[number]:
        tokens += [1 + id] * workload.hash_block
    del tokens[length:]
    return tokens + [OUTPUT + number] * (length - len(tokens))


def simulate(
    spec: ClusterSpec, workload: Workload, report: Report = lambda done, total, what: None
) -> SimulationResult:
    """Serve the workload on the cluster. Prompts are made when they arrive: all at once would not fit into memory."""
    return Cluster(spec, lambda job: prompt_tokens(workload, job.number), report).run(jobs_of(workload))


def crowd(workload: Workload, rate: float, seconds: float, seed: int = 0) -> Workload:
    """The traffic of many services like this one: copies that each begin at a random moment of the trace, until the
    rate is reached, for so many seconds. Copies share nothing with each other."""
    copies = max(1, round(rate / workload.rate))
    source = random.Random(seed)
    rows: list[tuple[float, int, int]] = []  # moment, copy, request
    for copy in range(copies):
        shift = source.random() * workload.seconds
        for number, at in enumerate(workload.arrivals):
            moment = (at - shift) % workload.seconds
            if moment < seconds:
                rows.append((moment, copy, number))
    rows.sort()
    found = workload.select([number for _, _, number in rows], [at for at, _, _ in rows])
    ids = found.hash_ids
    if ids is not None:
        most = 1 + max((max(one, default=0) for one in ids), default=0)
        ids = tuple(tuple(id + most * copy for id in one) for one, (_, copy, _) in zip(ids, rows))
    return replace(found, name=f"{workload.name} x {copies}", hash_ids=ids, texts=None)


def shifting(chat: Workload, code: Workload, seconds: float, rates: tuple[float, float]) -> Workload:
    """A load that changes its kind: chat for a third of the time, long prompts, then both at once."""
    third = seconds / 3
    parts: list[tuple[float, int, int]] = []
    for workload, rate, start, length in (
        (chat, rates[0], 0.0, third),
        (code, rates[1], third, third),
        (chat, rates[0] / 2, 2 * third, third),
        (code, rates[1] / 2, 2 * third, third),
    ):
        fast = workload.at_rate(rate)
        columns = zip(fast.arrivals, fast.prompts, fast.outputs)
        parts += [(start + at, prompt, output) for at, prompt, output in columns if at < length]
    parts.sort()
    return Workload(
        f"{chat.name}, then {code.name}, then both",
        tuple(at - parts[0][0] for at, _, _ in parts),
        tuple(prompt for _, prompt, _ in parts),
        tuple(output for _, _, output in parts),
    )
