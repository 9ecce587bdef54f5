"""An engine process that computes nothing: the real loop and scheduler around a simulated device, with planned faults.

The model's name carries JSON: seconds per step, and tokens that break the process when a step computes them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.core import Engine
from tokenmill.engine.runner.simulated import SimulatedRunner
from tokenmill.engine.scheduler import Limits, Scheduler
from tokenmill.engine.step import Pending, Step
from tokenmill.errors import ConfigError
from tokenmill.kv.manager import KVManager
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.main import LoadedEngine, main
from tokenmill.step_time import LinearStepTime

POISON = 1000  # the one token that the model knows but never says
VOCAB, MAX_LEN, BLOCK, BLOCKS, ROWS, STEP_TOKENS = 1000, 2048, 16, 2048, 64, 256


class WallClock:
    """The clock that a simulated device wants, in real time."""

    @property
    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


class FaultyRunner(SimulatedRunner):
    def __init__(self, plan: dict[str, Any]) -> None:
        step_time = LinearStepTime(plan.get("step", 0.002), 0, 0, 0, 0)
        super().__init__(BLOCKS, BLOCK, WallClock(), vocab=VOCAB, step_time=step_time)  # type: ignore[arg-type]
        self._plan = plan

    def launch(self, step: Step) -> Pending:
        pending = super().launch(step)
        for row, start, count in zip(step.rows, step.starts, step.counts):
            for token in self._rows[row].tokens[start : start + count]:
                self._suffer(token)
        return pending

    def _suffer(self, token: int) -> None:
        if token == self._plan.get("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        elif token == self._plan.get("exit"):
            print("the device fell off the bus", file=sys.stderr, flush=True)
            os._exit(7)
        elif token == self._plan.get("hang"):
            time.sleep(3600)
        elif token == self._plan.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)


def build(config: EngineConfig, tell: Callable[[int, int, str], None]) -> LoadedEngine:
    plan = json.loads(config.model)
    tell(0, 1, "loading weights")
    if (gate := plan.get("gate")) is not None:  # a file that says when to go on, after what is told here
        for what, done, total in plan["stages"]:
            tell(done, total, what)
        while not os.path.exists(gate):
            time.sleep(0.005)
    if plan.get("refuse"):
        raise ConfigError(plan["refuse"])
    if (fuse := plan.get("fuse")) is not None:  # a file with the number of starts that still work
        with open(fuse, "r+") as file:
            left = int(file.read())
            file.seek(0)
            file.write(f"{left - 1:4}")
        if left <= 0:
            raise RuntimeError("no device was found")
    limits = Limits(ROWS, STEP_TOKENS, config.max_queued_requests, config.max_queued_tokens)
    scheduler = Scheduler(limits, KVManager(BLOCKS, BLOCK))
    engine = Engine(scheduler, FaultyRunner(plan), overlap=bool(config.overlap))
    sizes = (VOCAB + 1, MAX_LEN, (2,), ROWS, STEP_TOKENS)
    ready = wire.EngineReady(wire.VERSION, os.getpid(), *sizes, "sim", ["simulated"], BLOCK)
    return LoadedEngine(engine, ready)


if __name__ == "__main__":
    sys.exit(main(build))
