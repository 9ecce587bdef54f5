"""The shipped figures of the H200 against the workloads measured in docs/performance.md."""

from __future__ import annotations

import random

import plan_models
import pytest

from tokenmill.plan.demand.workload import Workload
from tokenmill.plan.planner.probe import StepPoint
from tokenmill.plan.simulator.cluster import ClusterSpec
from tokenmill.plan.simulator.machines import Machine
from tokenmill.plan.simulator.replica import ReplicaSpec
from tokenmill.plan.simulator.simulate import simulate
from tokenmill.plan.solve.gpus import GPUS, rates_of
from tokenmill.plan.solve.roofline import ElementBytes, Roofline

WITHIN = 0.15


def mixed(count: int) -> list[tuple[int, int]]:
    """The lengths of scripts/h200_workloads.py's offline mix: its source draws the prompt's ids in between."""
    source, found = random.Random(0), []
    for _ in range(count):
        prompt = source.randint(100, 1024)
        for _ in range(prompt):
            source.randrange(1000, 100_000)
        found.append((prompt, source.randint(100, 1024)))
    return found


def batch_seconds(model: Roofline, requests: list[tuple[int, int]], step_tokens: int) -> float:
    """All there at the beginning, (prompt, answer) tokens each, on the real scheduler."""
    machine = Machine("h200", model, 1, 860_000, 1, 512, step_tokens, overlap=True)
    work = Workload("batch", (0.0,) * len(requests), *zip(*requests, strict=True))
    return simulate(ClusterSpec(ReplicaSpec(machine, prefix_caching=False)), work).seconds


WORK = {
    "single": [(128, 256)],
    "batch64": [(1024, 256)] * 64,
    "prefill": [(4096, 1)] * 16,
    "mix": mixed(256),
    "offline512": [(1024, 512)] * 512,
}
SECONDS = {
    ("qwen3-0.6b", "dense"): {"single": 0.219, "batch64": 1.078, "prefill": 0.181, "mix": 5.77, "offline512": 11.2},
    ("llama3-8b", "dense"): {"single": 1.068, "batch64": 3.476, "prefill": 1.588, "mix": 14.0, "offline512": 29.0},
    ("llama3-8b", "fp8"): {"single": 0.713, "batch64": 2.352, "prefill": 0.941, "mix": 11.05, "offline512": 21.32},
    ("qwen3-30b-a3b", "dense"): {"single": 0.72, "batch64": 5.256, "prefill": 0.88, "mix": 21.93},
}


# Milliseconds of steps of llama3-8b: (decoding rows, keys of each, tokens of a chunk, keys before it). For shorter
# chunks the host sets the pace, and for more rows of int8 and int4 the library (see WEIGHT_ONLY_ROWS).
STEPS = {
    "int4": {
        (1, 56, 0, 0): 1.91, (2, 56, 0, 0): 2.23, (4, 56, 0, 0): 2.33, (8, 56, 0, 0): 2.44, (16, 56, 0, 0): 2.50,
        (32, 56, 0, 0): 2.99, (64, 56, 0, 0): 3.73, (1, 6000, 0, 0): 2.31, (4, 2000, 0, 0): 2.81, (8, 512, 0, 0): 2.71,
        (16, 1000, 0, 0): 3.22, (32, 2048, 0, 0): 5.14, (64, 500, 0, 0): 4.70, (64, 2000, 0, 0): 7.63,
        (0, 0, 1024, 0): 27.69, (0, 0, 2048, 0): 50.22, (0, 0, 4096, 0): 100.67, (0, 0, 8000, 0): 208.73,
        (0, 0, 1024, 6000): 32.57, (0, 0, 2048, 4000): 57.64, (64, 1024, 1024, 0): 33.65,
    },
    "int8": {
        (1, 56, 0, 0): 2.66, (2, 56, 0, 0): 2.72, (4, 56, 0, 0): 2.81, (8, 56, 0, 0): 2.96, (16, 56, 0, 0): 3.06,
        (32, 56, 0, 0): 3.61, (64, 56, 0, 0): 3.95,
    },
    "w8a8": {
        (1, 56, 0, 0): 2.71, (2, 56, 0, 0): 3.25, (8, 56, 0, 0): 3.15, (16, 56, 0, 0): 3.02, (64, 56, 0, 0): 3.35,
        (128, 56, 0, 0): 4.21, (256, 56, 0, 0): 5.65, (1, 6000, 0, 0): 3.04, (4, 2000, 0, 0): 3.71,
        (16, 1000, 0, 0): 3.73, (32, 2048, 0, 0): 5.27, (64, 2000, 0, 0): 7.33, (128, 1024, 0, 0): 7.93,
        (192, 400, 0, 0): 7.49, (256, 1024, 0, 0): 12.60, (256, 2000, 0, 0): 19.87, (0, 0, 1024, 0): 16.02,
        (0, 0, 4096, 0): 55.63, (0, 0, 8000, 0): 120.57, (0, 0, 2048, 4000): 31.88, (128, 1000, 2048, 0): 33.89,
    },
}  # fmt: skip
PREFILL = {"int4": 1.556, "int8": 1.569, "w8a8": 0.856}  # seconds, 16 prompts of 4,096 tokens
WEIGHT_BYTES = {"int4": 0.5 + 4 / 128, "int8": 1.0, "w8a8": 1.0}


@pytest.mark.parametrize("form", STEPS)
def test_measured_steps_of_quantized_weights_are_predicted_within_15_percent(form):
    shape = plan_models.shape("llama3-8b")
    cost = Roofline(shape, ElementBytes(WEIGHT_BYTES[form], 2, 2), rates_of(GPUS["h200"], form))
    off = {}
    for (rows, keys, chunk, start), ms in STEPS[form].items():
        point = StepPoint(rows, keys, chunk, start)
        off[point.name] = cost.seconds(point.facts(shape)) / (ms / 1e3) - 1
    off["prefill"] = batch_seconds(cost, WORK["prefill"], 8192) / PREFILL[form] - 1
    assert max(abs(one) for one in off.values()) < WITHIN, off


@pytest.mark.parametrize(("model", "form"), SECONDS)
def test_measured_workloads_are_predicted_within_15_percent(model, form):
    shape = plan_models.shape(model)
    cost = Roofline(shape, ElementBytes(1 if form == "fp8" else 2, 2, 2), rates_of(GPUS["h200"], form))
    step_tokens = 8192 if model == "llama3-8b" else 16384
    found = SECONDS[model, form].items()
    off = {name: batch_seconds(cost, WORK[name], step_tokens) / seconds - 1 for name, seconds in found}
    assert max(abs(one) for one in off.values()) < WITHIN, off
