"""Steps that read prompts on a GPU: plainly against recorded pieces, with the time of host and device beside it.

    python scripts/gpu_prompts.py                       # llama3-8b's and qwen3-0.6b's shapes, random weights
    python scripts/gpu_prompts.py --shapes llama3-8b --quantization fp8

*step* is the time of a step when each is launched before the one before it is awaited, as in the engine; both ways take
turns. *device* is that of steps that were all launched while the device was kept busy with something else, *host* what
launching them took. Sizes beyond what an engine records by itself are recorded here, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_quantized import engine
from h200_workloads import COMMON, SHAPES

from tokenmill.engine.runner.capture import Capture
from tokenmill.engine.runner.piecewise import PieceGraphs, tokens_worth_recording
from tokenmill.engine.step import Step
from tokenmill.plan.planner.probe import Probe, StepPoint
from tokenmill.plan.solve.memory import RECORDED_TOKENS

POINTS = (
    *(StepPoint(chunk=tokens) for tokens in (16, 64, 100, 128, 256, 300, 400, 512, 1024)),
    StepPoint(32, 512, 128),
    StepPoint(64, 1024, 400),
)
SIZES = (16, 32, 64, 128, 256, 512)  # of which the cost of recording is told
ROUNDS, BURST = 5, 5  # turns of both ways; steps of each
QUEUED = 2  # steps that are launched while the device is busy: more would not fit into its queue
BUSY_CYCLES = 150_000_000  # about 80 ms


@dataclass(frozen=True)
class Way:
    """Milliseconds of a step, run in one way."""

    step: float
    device: float
    host: float
    tokens: list[list[int]]


class Bench:
    """One engine, whose runner is driven past its scheduler."""

    def __init__(self, llm: Any) -> None:
        self.probe = Probe(llm._built)
        self.runner = llm._built.engine.runner
        self.worth = tokens_worth_recording(self.runner.decoder.spec, llm._built.settings.max_step_tokens)
        capture = Capture(self.runner.device)
        self.pieces = PieceGraphs(self.runner.decoder, self.runner.state, RECORDED_TOKENS, capture)

    def compare(self, point: StepPoint) -> tuple[Way, Way]:
        self.probe._run(self.probe._admit(point))
        step = self.probe._step(point)
        found: list[Way] = []
        times: list[list[float]] = [[], []]
        ways: Sequence[PieceGraphs | None] = (None, self.pieces)
        for way in ways:  # compiled, and recorded; a larger recording may put that off a few times
            self.runner._pieces = way
            for _ in range(7):
                tokens = self.runner.launch(step).wait().tokens
            device, host = self._queued(step)
            found.append(Way(0.0, device, host, tokens))
        for _ in range(ROUNDS):
            for way, mine in zip(ways, times, strict=True):
                self.runner._pieces = way
                mine.append(1e3 * self.probe._burst(step, BURST))
        plain, recorded = (
            Way(statistics.median(mine), one.device, one.host, one.tokens)
            for mine, one in zip(times, found, strict=True)
        )
        return plain, recorded

    def _queued(self, step: Step) -> tuple[float, float]:
        """Milliseconds per step of the device and of the host; the least of a few."""
        devices, hosts = [], []
        for _ in range(3):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            began = time.perf_counter()
            for _ in range(QUEUED):
                self.runner.launch(step)
            hosts.append(1e3 * (time.perf_counter() - began) / QUEUED)
            end.record()
            torch.cuda.synchronize()
            devices.append(begin.elapsed_time(end) / QUEUED)
        return min(devices), min(hosts)

    def cost(self) -> str:
        """What it takes to record some sizes, with everything compiled and set up."""
        self.probe._run(self.probe._admit(StepPoint(chunk=max(SIZES))))
        torch.cuda.synchronize()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        self.runner._pieces = PieceGraphs(
            self.runner.decoder, self.runner.state, max(SIZES), Capture(self.runner.device)
        )
        times: list[list[float]] = [[], [], []]  # plain, recorded, replayed
        for tokens in SIZES:  # from small to large, so that none stands in for another
            for mine in times:
                began = time.perf_counter()
                self.runner.launch(self.probe._step(StepPoint(chunk=tokens))).wait()
                mine.append(1e3 * (time.perf_counter() - began))
        assert self.runner._pieces.replays == 2 * len(SIZES)
        tensors = torch.cuda.memory_reserved() - reserved
        count = len(SIZES) * self.runner.decoder.spec.num_layers
        besides = free - torch.cuda.mem_get_info()[0] - tensors
        plain, recorded, replayed = map(statistics.median, times)
        return (
            f"{len(SIZES)} sizes up to {max(SIZES)} tokens: {tensors / 2**20:.0f} MiB of tensors, "
            f"{besides / 2**10 / count:.0f} KiB more for each of {count} pieces; a step takes {plain:.1f} ms plainly, "
            f"{recorded:.1f} when it is recorded, {replayed:.1f} then"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["llama3-8b", "qwen3-0.6b"])
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    began = time.perf_counter()
    pair = f"{'plain':>9s}{'pieces':>9s}"
    table = [
        f"{'':>44s}{'step ms':>18s}{'':>8s}{'device ms':>18s}{'host ms':>18s}",
        f"{'shape':>12s} {'step':>31s}{pair}{'gain':>8s}{pair}{pair}",
    ]
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
            llm = engine(folder, quantization=arguments.quantization)
        bench = Bench(llm)
        print(
            f"{shape}: ready after {time.perf_counter() - began:.0f} s; recorded up to {bench.worth} tokens by itself"
        )
        for point in POINTS:
            plain, pieces = bench.compare(point)
            gain = f"x{plain.step / pieces.step:.2f}"
            line = f"{shape:>12s} {point.name:>31s}{plain.step:9.2f}{pieces.step:9.2f}{gain:>8s}"
            line += f"{plain.device:9.2f}{pieces.device:9.2f}{plain.host:9.2f}{pieces.host:9.2f}"
            line += "" if plain.tokens == pieces.tokens else f"   {_differ(plain.tokens, pieces.tokens)} tokens differ"
            table.append(line)
            print(f"{line}   ({time.perf_counter() - began:.0f} s)", flush=True)
        table.append(f"{shape:>12s} {bench.cost()}")
        print(table[-1], f"({time.perf_counter() - began:.0f} s)", flush=True)
        llm.shutdown()
        del llm, bench
    print("\n" + "\n".join(table))


def _differ(mine: list[list[int]], theirs: list[list[int]]) -> str:
    return f"{sum(one != other for one, other in zip(mine, theirs, strict=True))} of {len(mine)}"


if __name__ == "__main__":
    main()
