"""Machines to simulate: how long steps take on one replica's hardware, and what it has room for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError
from tokenmill.step_time import LinearStepTime, StepTimeModel


@dataclass(frozen=True)
class Machine:
    """One replica's hardware and model, as the simulator needs them."""

    name: str
    step_time: StepTimeModel
    gpus: int
    kv_tokens: int  # that fit into its memory
    kv_bytes: int  # per token, over all its GPUs
    max_rows: int
    step_tokens: int
    overlap: bool  # a step is launched before the one before it is committed
    stages: int = 1  # of a pipeline, each with the same share of a step's time and a step of its own

    def line(self) -> str:
        price = str(self.step_time) if isinstance(self.step_time, LinearStepTime) else "model"
        return f"{self.name}: {self.gpus} GPU(s), {self.kv_tokens:,} KV tokens, {self.max_rows} rows, cost {price}"


# h200-8b and cpu-135m are fitted by hand to docs/performance.md (single stream, batch 64 and 16, prefill).
# h200x4-70b is computed, not measured: bytes at 85 % of 4.25 TB/s, FLOPs at 85 % of 700 TFLOP/s, 2 ms of all-reduces.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "h200-8b", LinearStepTime(4.1e-3, 1.2e-5, 3.6e-8, 2.24e-5, 9e-10), 1, 800_000, 131_072, 256, 8192, True
        ),
        Machine(
            "h200x4-70b", LinearStepTime(1.1e-2, 2e-5, 2.3e-8, 5.9e-5, 1.1e-9), 4, 1_100_000, 327_680, 256, 8192, True
        ),
        Machine("cpu-135m", LinearStepTime(2.4e-3, 1.2e-3, 1.5e-7, 5.6e-4, 1e-9), 1, 100_000, 46_080, 64, 512, False),
    )
}


def machine_named(name: str) -> Machine:
    if name not in MACHINES:
        raise ConfigError(f"there is no machine {name!r}; it may be one of {', '.join(MACHINES)}")
    return MACHINES[name]
