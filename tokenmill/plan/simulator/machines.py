"""StepCost: seconds that one step takes, from what is in it; a linear one, its fit, and machines to simulate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np

from tokenmill.engine.step import Facts
from tokenmill.errors import ConfigError


class StepCost(Protocol):
    def seconds(self, decode_rows: int, decode_context: int, prefill_tokens: int, prefill_attended: int) -> float:
        """How long a step takes that decodes `decode_rows` tokens which look at `decode_context` tokens in all, and
        computes `prefill_tokens` of prompts, whose (token, token it looks at) pairs are `prefill_attended`."""
        ...


@dataclass(frozen=True)
class LinearCost:
    """Weights once per step, then a price for every row, token and pair. All in seconds."""

    base: float
    per_row: float
    per_context: float
    per_prefill: float
    per_attended: float

    def seconds(self, decode_rows: int, decode_context: int, prefill_tokens: int, prefill_attended: int) -> float:
        return (
            self.base
            + self.per_row * decode_rows
            + self.per_context * decode_context
            + self.per_prefill * prefill_tokens
            + self.per_attended * prefill_attended
        )


def fit_linear(measured: Sequence[tuple[Facts, float]]) -> LinearCost:
    """The linear cost with the smallest relative squared error over measured steps; no price is below zero.

    Its sum over the steps is the measured one: disturbed steps weigh little in the shape, but take their time.
    """
    if len(measured) < 5:
        raise ConfigError(f"{len(measured)} measured steps are too few to fit a cost; measure at least 5")
    seconds = np.array([time for _, time in measured])
    columns = np.array([(1, *facts) for facts, _ in measured], dtype=float) / seconds[:, None]  # [steps, 5]
    live = list(range(columns.shape[1]))
    prices = np.zeros(columns.shape[1])
    while live:  # active set: whoever would be paid for doing work is left out, and the others are fitted anew
        scale = np.maximum(np.abs(columns[:, live]).max(axis=0), 1e-30)
        found = np.linalg.lstsq(columns[:, live] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (found >= 0).all():
            prices[live] = found
            break
        live.pop(int(np.argmin(found * scale)))
    told = float((columns @ prices * seconds).sum())
    return LinearCost(*(prices * (seconds.sum() / told if told > 0 else 1.0)).tolist())


def relative_error(cost: StepCost, measured: Iterable[tuple[Facts, float]]) -> float:
    """Mean over steps of |predicted - measured| / measured."""
    errors = [abs(cost.seconds(*facts) - time) / time for facts, time in measured]
    return sum(errors) / len(errors)


@dataclass(frozen=True)
class Machine:
    """One replica's hardware and model, as the simulator needs them."""

    name: str
    cost: StepCost
    gpus: int
    kv_tokens: int  # that fit into its memory
    kv_bytes: int  # per token, over all its GPUs
    max_rows: int
    step_tokens: int
    overlap: bool  # a step is launched before the one before it is committed

    def line(self) -> str:
        price = (
            ", ".join(f"{value:.3g}" for value in astuple(self.cost)) if isinstance(self.cost, LinearCost) else "model"
        )
        return f"{self.name}: {self.gpus} GPU(s), {self.kv_tokens:,} KV tokens, {self.max_rows} rows, cost {price}"


# h200-8b and cpu-135m are fitted by hand to docs/performance.md (single stream, batch 64 and 16, prefill).
# h200x4-70b is computed, not measured: bytes at 85 % of 4.25 TB/s, FLOPs at 85 % of 700 TFLOP/s, 2 ms of all-reduces.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200-8b", LinearCost(4.1e-3, 1.2e-5, 3.6e-8, 2.24e-5, 9e-10), 1, 800_000, 131_072, 256, 8192, True),
        Machine("h200x4-70b", LinearCost(1.1e-2, 2e-5, 2.3e-8, 5.9e-5, 1.1e-9), 4, 1_100_000, 327_680, 256, 8192, True),
        Machine("cpu-135m", LinearCost(2.4e-3, 1.2e-3, 1.5e-7, 5.6e-4, 1e-9), 1, 100_000, 46_080, 64, 512, False),
    )
}


def machine_named(name: str) -> Machine:
    if name not in MACHINES:
        raise ConfigError(f"there is no machine {name!r}; it may be one of {', '.join(MACHINES)}")
    return MACHINES[name]
