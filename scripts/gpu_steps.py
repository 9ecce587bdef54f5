"""Where the time of a decode step through the engine goes: recorded or not, kernels by family, gaps between steps.

    python scripts/gpu_steps.py                        # 256 rows at about 1k keys: bf16, w8a8 + int8 KV, fp8 + fp8 KV
    python scripts/gpu_steps.py --only w8a8+int8 --rows 64

Steps are counted by what the runner did: `replay` a recorded one, `record` it first, `plain` (first run at its size),
`eager` (prompts, or sampling that is not recorded). *ending* is a batch of which 8 requests end in every step, with
nothing recorded before: once as it is, once without larger sizes standing in for smaller ones.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_quantized import engine, run
from h200_workloads import COMMON, SHAPES, Work, fixed

from tokenmill import SamplingParams
from tokenmill.engine.runner import recordings as recorded_steps
from tokenmill.plan.planner.probe import Probe, StepPoint

FORMS = {
    "bf16": (None, "auto"), "w8a8+int8": ("w8a8", "int8"), "fp8+fp8": ("fp8", "fp8"),
    "w8a8": ("w8a8", "auto"), "fp8": ("fp8", "auto"), "int4": ("int4,lm_head=int4", "auto"),
}  # fmt: skip
USUAL = ("bf16", "w8a8+int8", "fp8+fp8")
ANSWER, PROFILED, SETTLE = 64, 6, 4  # tokens; steps
LEAVING = 8  # requests that end in every step of an ending batch
FAMILIES = {
    "products": r"gemm|nvjet|cutlass|cublas|xmma|matmul|splitk",
    "attention": r"attention|attend|decode|flash|paged|join|merge",
    "rope and kv write": r"rope",
    "norms, activation, rounding": r"norm|act_mul|silu|quantize",
    "sampling": r"sample|survey|choose|argmax|draw",
    "copies": r"memcpy|memset|copy",
}


@dataclass(frozen=True)
class Seen:
    """One call of the engine's step that launched something."""

    how: str
    rows: int
    tokens: int
    wall: float  # seconds
    launch: float  # of them in the runner's launch


class Watch:
    """Stands before the runner's `launch` and notes what became of every step."""

    def __init__(self, llm: Any) -> None:
        self.processor, self.runner = llm._processor, llm._built.engine.runner
        self.graphs, self._launch = self.runner._graphs, self.runner.launch
        self.seen: list[Seen] = []
        self._last: tuple[str, int, int, float] | None = None
        self._recorded = 0
        self.runner.launch = self._watched
        if self.graphs is not None:
            record = self.graphs._record

            def counted(*arguments: Any) -> None:
                self._recorded += 1
                record(*arguments)

            self.graphs._record = counted

    def _watched(self, step: Any) -> Any:
        counts, began = self._counts(), time.perf_counter()
        pending = self._launch(step)
        took = time.perf_counter() - began
        replays, plain, recordings = (now - then for now, then in zip(self._counts(), counts, strict=True))
        how = "record" if recordings else "replay" if replays else "plain" if plain else "eager"
        self._last = how, len(step.rows), step.num_tokens, took
        return pending

    def _counts(self) -> tuple[int, int, int]:
        return (self.graphs.replays, self.graphs.plain_runs, self._recorded) if self.graphs is not None else (0, 0, 0)

    def step(self) -> None:
        self._last = None
        began = time.perf_counter()
        self.processor.step()
        wall = time.perf_counter() - began
        if self._last is not None:
            how, rows, tokens, launch = self._last
            self.seen.append(Seen(how, rows, tokens, wall, launch))

    def submit(self, work: Work) -> list[Any]:
        states = []
        for prompt, answer in work:
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
            states.append(self.processor.prepare(prompt, params))
            self.processor.submit(states[-1])
        return states

    def forget_recordings(self) -> None:
        if self.graphs is not None:
            self.graphs.recordings = recorded_steps.Recordings(self.graphs.recordings.sizes)
            self.graphs._capture.renew()  # the old pool went with its last recording


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--only", nargs="*", choices=FORMS, default=list(USUAL))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--keys", type=int, default=1024)
    arguments = parser.parse_args()
    began, table = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | SHAPES[arguments.shape]))
        for name in arguments.only:
            quantization, cache = FORMS[name]
            llm = engine(folder, quantization=quantization, kv_cache_dtype=cache)
            print(f"== {name} ({time.perf_counter() - began:.0f} s)", flush=True)
            table.append(f"{name:>10s} " + one(llm, arguments.rows, arguments.keys))
            print(f"   ({time.perf_counter() - began:.0f} s)", flush=True)
            llm.shutdown()
            del llm
    head = ("", "steps ms", "runner ms", "busy ms", "gaps ms", "launch ms", "plain ms", "ending s", "without")
    print("\n" + f"{head[0]:>10s} " + "".join(f"{one:>11s}" for one in head[1:]))
    print("\n".join(table))


def one(llm: Any, rows: int, keys: int) -> str:
    """Everything about one engine; a line of the table."""
    run(llm, fixed(rows, 64, 8, 9))
    watch = Watch(llm)
    work = fixed(rows, keys, ANSWER, 10)
    states = watch.submit(work)
    while not all(state.leader.num_output > SETTLE for state in states):
        watch.step()
    first, busy, gaps = len(watch.seen), 0.0, 0.0
    profiled: list[Seen] = []
    while watch.processor.engine.has_work:
        watch.step()
        if len(watch.seen) == first + 12:  # in the middle of the steps in which all rows decode
            kept = len(watch.seen)
            busy, gaps = profile(watch)
            profiled, watch.seen = watch.seen[kept:], watch.seen[:kept]
    full = [seen for seen in watch.seen[first:] if seen.rows == rows]
    show("all rows decode", full)
    show("the batch ends", [seen for seen in watch.seen[first:] if seen.rows < rows])
    show("prompts come in", watch.seen[:first])
    print(f"   profiled: {Counter(seen.how for seen in profiled)}", flush=True)
    ending = [(prompt, 16 + index // LEAVING) for index, (prompt, _) in enumerate(work)]
    end(watch, ending, 0)  # kernels of all sizes compile
    took, plain, said = [], [], []
    for patience in (recorded_steps.PATIENCE, 0):
        seconds, tokens = end(watch, ending, patience)
        took.append(seconds)
        said.append(tokens)
        show(f"ending, {patience} stand-ins", watch.seen)
        plain += [seen.wall for seen in watch.seen if seen.how in ("plain", "record")]
    print(f"   {sum(map(list.__eq__, *said))} of {rows} answers equal with and without stand-ins", flush=True)
    watch.runner.launch = watch._launch
    probe = Probe(llm._built)
    point = StepPoint(rows, keys + ANSWER // 2)
    alone = probe.time(point).seconds if probe.fits(point) else float("nan")
    walls, launches = [seen.wall for seen in full] or [0.0], [seen.launch for seen in full] or [0.0]
    figures = (1e3 * statistics.median(walls), 1e3 * alone, busy, gaps, 1e3 * statistics.median(launches),
               1e3 * statistics.median(plain or [0.0]), *took)  # fmt: skip
    return "".join(f"{figure:11.2f}" for figure in figures)


def end(watch: Watch, work: Work, patience: int) -> tuple[float, list[list[int]]]:
    """Seconds from when all are running to the end of the last, and all answers. Prompts are in the prefix cache."""
    usual, recorded_steps.PATIENCE = recorded_steps.PATIENCE, patience
    watch.forget_recordings()
    states = watch.submit(work)
    while not all(state.leader.num_output > SETTLE for state in states):
        watch.step()
    watch.seen = []
    began = time.perf_counter()
    while watch.processor.engine.has_work:
        watch.step()
    recorded_steps.PATIENCE = usual
    return time.perf_counter() - began, [list(state.leader.output) for state in states]


def show(what: str, seen: list[Seen]) -> None:
    """Steps by what was done with them."""
    by: dict[str, list[Seen]] = defaultdict(list)
    for step in seen:
        by[step.how].append(step)
    for how, steps in by.items():
        walls, launches = [1e3 * one.wall for one in steps], [1e3 * one.launch for one in steps]
        sizes = f"{min(one.rows for one in steps)}-{max(one.rows for one in steps)} rows"
        print(
            f"   {what:22s} {len(steps):4d} x {how:6s} {sizes:>14s} wall {statistics.median(walls):8.2f} ms "
            f"(most {max(walls):8.2f}), launching {statistics.median(launches):8.2f} ms",
            flush=True,
        )


def profile(watch: Watch) -> tuple[float, float]:
    """Milliseconds per step that the device works, and that it waits between kernels; kernels by family are printed."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds if torch.cuda.is_available() else kinds[:1]) as found:
        for _ in range(PROFILED):
            watch.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    )
    spent, names = Counter[str](), Counter[str]()
    waits: list[float] = []
    until = spans[0][0] if spans else 0.0
    for start, stop, name in spans:
        family = next((kind for kind, words in FAMILIES.items() if re.search(words, name, re.I)), "other")
        spent[family] += stop - start
        names[f"{family}: {name[:70]}"] += stop - start
        waits.append(max(0.0, start - until))
        until = max(until, stop)
    for family, microseconds in spent.most_common():
        print(f"   device {microseconds / PROFILED / 1e3:8.3f} ms a step  {family}")
    for name, microseconds in names.most_common(10):
        print(f"     {microseconds / PROFILED:9.1f} us a step  {name}")
    long = sorted((wait for wait in waits if wait > 20), reverse=True)
    print(f"   device waits: {sum(waits) / PROFILED / 1e3:.3f} ms a step, {len(long)} over 20 us: "
          f"{[round(wait) for wait in long[:8]]} us", flush=True)  # fmt: skip
    whole = (until - spans[0][0]) if spans else 0.0
    return (whole - sum(waits)) / PROFILED / 1e3, sum(waits) / PROFILED / 1e3


if __name__ == "__main__":
    main()
