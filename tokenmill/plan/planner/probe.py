"""Times single steps of a real engine: rows at chosen contexts and chunks of chosen sizes, straight to its runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.plan.solve.roofline import facts_for
from tokenmill.plan.solve.shape import ModelShape, shape_of
from tokenmill.step_time import Facts

if TYPE_CHECKING:
    from tokenmill.engine.build import Built
    from tokenmill.engine.step import Step

AHEAD = 1  # steps in flight on a GPU, as in the engine
QUIET = 0.25  # of the repeats are taken to be undisturbed: the time at this share of them counts


@dataclass(frozen=True)
class StepPoint:
    """A step: `rows` decode at `context` keys each, and beside them a chunk is read."""

    rows: int = 0
    context: int = 0
    chunk: int = 0
    start: int = 0  # position of the chunk's first token

    @property
    def name(self) -> str:
        parts = [f"{self.rows} rows at {self.context}"] if self.rows else []
        if self.chunk:
            parts.append(f"chunk of {self.chunk}" + (f" after {self.start}" if self.start else ""))
        return " + ".join(parts)

    def facts(self, shape: ModelShape) -> Facts:
        chunks = [(self.start, self.chunk, 1)] if self.chunk else []
        return facts_for(shape, [self.context] * self.rows, chunks)


@dataclass(frozen=True)
class Timed:
    point: StepPoint
    seconds: float


# Spread so that each rate shows in some of them; no two are proportional to one another.
CPU_POINTS = (
    StepPoint(1, 64),
    StepPoint(1, 1024),
    StepPoint(4, 256),
    StepPoint(8, 64),
    StepPoint(16, 128),
    StepPoint(16, 1024),
    StepPoint(32, 256),
    StepPoint(64, 64),
    StepPoint(64, 512),
    StepPoint(chunk=16),
    StepPoint(chunk=64),
    StepPoint(chunk=256),
    StepPoint(chunk=512),
    StepPoint(chunk=256, start=1024),
    StepPoint(16, 256, 128),
)
GPU_POINTS = (
    StepPoint(1, 128),
    StepPoint(1, 6000),
    StepPoint(8, 512),
    StepPoint(32, 128),
    StepPoint(32, 2048),
    StepPoint(128, 1024),
    StepPoint(256, 64),
    StepPoint(256, 1024),
    StepPoint(chunk=64),
    StepPoint(chunk=512),
    StepPoint(chunk=2048),
    StepPoint(chunk=8000),
    StepPoint(chunk=1024, start=6000),
    StepPoint(64, 1024, 1024),
)


def runner_of(built: Built) -> Any:
    """The engine's own runner, with its decoder and its memory: more than the protocol of runners promises."""
    return built.engine.runner


class Probe:
    """Drives an engine's runner past its scheduler. The engine is of no other use afterwards."""

    def __init__(self, built: Built, clock: Callable[[], float] = time.perf_counter) -> None:
        self.shape = shape_of(built.spec, built.files.name)
        self._runner = runner_of(built)
        self._settings = built.settings
        self._on_gpu = self._runner.device.type == "cuda"
        self._clock = clock  # time of the process where others use the same cores
        self._number = 0

    def fits(self, point: StepPoint) -> bool:
        room, rows = self._settings, point.rows + (point.chunk > 0)
        longest = max(point.context, point.start + point.chunk) + 1
        return (
            rows <= room.max_rows
            and point.rows + point.chunk <= room.max_step_tokens
            and longest < room.max_len
            and rows * -(-longest // room.block_size) < room.num_blocks
        )

    def time(self, point: StepPoint, budget: float = 0.6, least: int = 4) -> Timed:
        """Seconds of such a step. The same step is computed again and again: nothing of it depends on what was."""
        self._run(self._admit(point))
        step = self._step(point)
        for _ in range(7):  # until a decode step is recorded, which a larger recording may put off a few times
            self._run(step)
        times: list[float] = []
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(times) < least:
            times.append(self._burst(step, 8) if self._on_gpu else self._burst(step, 1))
        return Timed(point, sorted(times)[int(QUIET * len(times))])

    def _burst(self, step: Step, count: int) -> float:
        """Seconds per step, each launched before the one before it is awaited where the engine does so, too."""
        began = self._clock()
        flying = []
        for _ in range(count):
            self._number += 1
            step.number = self._number
            flying.append(self._runner.launch(step))
            if len(flying) > (AHEAD if self._on_gpu else 0):
                flying.pop(0).wait()
        for pending in flying:
            pending.wait()
        return (self._clock() - began) / count

    def _run(self, step: Step) -> None:
        self._number += 1
        step.number = self._number
        self._runner.launch(step).wait()

    def _step(self, point: StepPoint) -> Step:
        from tokenmill.engine.step import Step

        rows = point.rows + (point.chunk > 0)
        return Step(
            number=0,
            rows=list(range(rows)),
            starts=[point.context - 1] * point.rows + ([point.start] if point.chunk else []),
            counts=[1] * point.rows + ([point.chunk] if point.chunk else []),
            samples=[1] * rows,
            num_singles=point.rows,
        )

    def _admit(self, point: StepPoint) -> Step:
        """The point's step with its rows' tokens and blocks. What was never written is filled: a CPU reads untouched
        memory from one page of zeros, which is no measure of anything.
        """
        from tokenmill.engine.step import Admission
        from tokenmill.params import SamplingParams

        step = self._step(point)
        block_size, next_block = self._settings.block_size, 1
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
        for row, start, count in zip(step.rows, step.starts, step.counts):
            length = start + count
            tokens = [(row * 7919 + place * 31 + 17) % self.shape.vocab for place in range(length)]
            blocks = -(-(length + 1) // block_size)
            step.admissions.append(Admission(row, tokens, length, params, row, [], start))
            step.blocks.append((row, 0, list(range(next_block, next_block + blocks))))
            next_block += blocks
        arena = self._runner.state.arena
        arena[:, :, :next_block].fill_(0.01 if arena.dtype.is_floating_point else 1)
        return step
