"""How busy the stages of a pipeline are, under the real scheduler in simulated time, beside the formula of the bubble.

    python scripts/pipeline_bubble.py

Every step takes the same time, divided evenly among the stages. M prompts of a step each: M / (M + S - 1). Rows that
decode 400 tokens: as long as there are S of them, every stage has a step.
"""

from __future__ import annotations

from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner.simulated import SimulatedClock, SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.scheduler.stages import LEAST_CHUNK
from tokenmill.kv.manager import KVManager
from tokenmill.params import SamplingParams
from tokenmill.step_time import Facts, LinearStepTime

STAGES = (2, 3, 4, 8)


class OneSecond(LinearStepTime):
    def seconds(self, facts: Facts) -> float:
        return 1.0


def busy(stages: int, requests: list[tuple[int, int]], step_tokens: int) -> float:
    """The share of the time that stages compute, of requests of so many prompt and answer tokens that come at once."""
    clock, blocks = SimulatedClock(), 4000
    shares = [1 / stages] * stages
    runner = SimulatedRunner(blocks, 16, clock, step_time=OneSecond(0, 0, 0, 0, 0), stages=shares)
    limits = Limits(64, step_tokens, stages=stages)
    engine = Engine(Scheduler(limits, KVManager(blocks, 16, False)), runner, overlap=False, clock=clock)
    for number, (prompt, output) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=output)
        engine.add(Request(str(number), [number + 3] * prompt, params, max_tokens=output, seed=0))
    while engine.has_work:
        engine.step()
    return sum(runner.busy) / len(runner.busy) / clock.now


def main() -> None:
    print("| | " + " | ".join(f"{stages} stages" for stages in STAGES) + " |")
    print("|---|" + "---|" * len(STAGES))
    for batches in (1, 2, 4, 8, 16, 64):
        prompts = [(LEAST_CHUNK, 1)] * batches
        found = (f"{busy(stages, prompts, 64):.3f} ({batches / (batches + stages - 1):.3f})" for stages in STAGES)
        print(f"| {batches} steps of prompts | " + " | ".join(found) + " |")
    for rows in (1, 2, 4, 8, 32):
        found = (f"{busy(stages, [(4, 400)] * rows, 256):.3f}" for stages in STAGES)
        print(f"| {rows} rows that decode | " + " | ".join(found) + " |")


if __name__ == "__main__":
    main()
