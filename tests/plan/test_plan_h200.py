"""The shipped figures of the H200 against the workloads measured in docs/performance.md."""

from __future__ import annotations

import random

import plan_models
import pytest

from tokenmill.plan.batch import Room, run_batch
from tokenmill.plan.cost import CostModel, Form
from tokenmill.plan.gpus import GPUS, rates_of

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


@pytest.mark.parametrize(("model", "form"), SECONDS)
def test_measured_workloads_are_predicted_within_15_percent(model, form):
    shape = plan_models.shape(model)
    cost = CostModel(shape, Form(1 if form == "fp8" else 2, 2, 2), rates_of(GPUS["h200"], form))
    room = Room(512, 8192 if model == "llama3-8b" else 16384, 860_000)
    off = {
        name: run_batch(cost, WORK[name], room).seconds / seconds - 1 for name, seconds in SECONDS[model, form].items()
    }
    assert max(abs(one) for one in off.values()) < WITHIN, off
