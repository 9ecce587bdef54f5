"""On a CUDA machine: check filtered sampling against the reference on fresh inputs, and time it.

    python scripts/gpu_sample.py                     # check, time, where the time goes, a sweep of launch shapes
    python scripts/gpu_sample.py --before FILE       # also compare with the `sample` of another version of sample.py

Each time is one call inside a CUDA graph that walks over several copies of the logits. TB/s are of logits read once,
against 4.25 measured on an H200. "real" logits fall off like those of a language model (a token's probability is a
power of its rank), "flat" ones are normal noise, whose nucleus is half the vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenmill.ops import reference
from tokenmill.ops.noise import gumbel_noise
from tokenmill.ops.triton.sample.filtered import FilterShape, sample_filtered
from tokenmill.ops.triton.sample.sampler import sample
from tokenmill.ops.types import SampleBatch

VOCAB = 128256
ROWS = (1, 16, 64, 256)
ROTATE_BYTES = 320 << 20  # several times the L2; one row stays in it, as it does behind the product that wrote it
CLOSE = 1e-5  # noise may differ in the last bit of a logarithm, and masses in the order of sums

Sample = Callable[[torch.Tensor, SampleBatch], torch.Tensor]

# name -> temperature, top_k, top_p, min_p, in turn for the rows
FILTERS: dict[str, list[tuple[float, int, float, float]]] = {
    "k40 p.9": [(1.0, 40, 0.9, 0.0)],
    "p.9": [(1.0, 0, 0.9, 0.0)],
    "k40": [(1.0, 40, 1.0, 0.0)],
    "min .05": [(1.0, 0, 1.0, 0.05)],
    "mixed": [(0.0, 0, 1.0, 0.0), (0.7, 40, 0.9, 0.0), (1.0, 0, 0.95, 0.0), (0.8, 0, 1.0, 0.05), (1.0, 0, 1.0, 0.0)],
}
CHECKED = FILTERS | {
    "k1": [(0.7, 1, 1.0, 0.0)],
    "k1000 p.5": [(1.3, 1000, 0.5, 0.0)],
    "k50000": [(1.0, 50_000, 1.0, 0.0)],
    "p.1-.99": [(1.0, 0, 0.1, 0.0), (0.6, 0, 0.5, 0.0), (1.5, 0, 0.8, 0.0), (2.0, 0, 0.99, 0.0)],
    "all three": [(0.9, 200, 0.7, 0.02), (1.0, 20, 0.99, 0.3), (1.1, 0, 0.6, 0.2)],
}
USUAL = FilterShape()
SWEEP = [
    USUAL,
    USUAL._replace(group=64, tile=32),
    USUAL._replace(chunk=2048, survey_warps=4, span=8),
    USUAL._replace(chunk=8192),
    USUAL._replace(survey_warps=4),
    USUAL._replace(span=1),
    USUAL._replace(span=4),
    USUAL._replace(rounds=1),
    USUAL._replace(round_warps=4),
    USUAL._replace(decide_warps=4),
    USUAL._replace(decide_warps=16),
    USUAL._replace(tile=128),
]
INPUTS = [  # vocabulary, kind of logits, dtype: what is checked
    (VOCAB, "real", torch.float32),
    (VOCAB, "flat", torch.float32),
    (VOCAB, "ties", torch.float32),
    (VOCAB, "masked", torch.float32),
    (151936, "real", torch.bfloat16),
    (50257, "flat", torch.float32),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another version of tokenmill/ops/triton/sample/sampler.py")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    shapes = [USUAL] if arguments.no_sweep else SWEEP
    tasks = [(shape, VOCAB, torch.float32) for shape in shapes]
    tasks += [(USUAL, vocab, dtype) for vocab, _, dtype in INPUTS if vocab != VOCAB]
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for failure in pool.map(compile_one, tasks):
            print(failure, end="", flush=True)
    print(f"compiled ({time.perf_counter() - begun:.0f} s)", flush=True)
    before = load(arguments.before) if arguments.before else None
    failed = check_all(before)
    print(f"checks {'FAILED' if failed else 'passed'} ({time.perf_counter() - begun:.0f} s)", flush=True)
    gc.disable()  # a collection would wait inside a capture
    timer = Timer()
    where_the_time_goes()
    if len(shapes) > 1:
        sweep(timer, shapes)
    table(timer, before)
    print(f"done in {time.perf_counter() - begun:.0f} s", flush=True)
    return int(failed)


def load(path: Path) -> Sample:
    spec = importlib.util.spec_from_file_location("sample_before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made: Sample = module.sample
    return made


def compile_one(task: tuple[FilterShape, int, torch.dtype]) -> str:
    """Fill Triton's cache; grids of up to 1,024 programs and larger ones are compiled apart."""
    shape, vocab, dtype = task
    try:
        for rows in (1, 65, 256):
            logits, batch = case(rows, vocab, "flat", FILTERS["mixed"])
            shaped(shape, logits.to(dtype), batch)
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAILED {compact(shape)}: {type(error).__name__}: {str(error)[:150]}\n"
    return ""


def shaped(shape: FilterShape, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    out = torch.empty_like(batch.seed)
    sample_filtered(logits, batch, out, shape)
    return out


# Inputs


def make_logits(rows: int, vocab: int, kind: str) -> torch.Tensor:
    noise = torch.randn(rows, vocab, device="cuda")
    if kind == "flat":
        return noise
    if kind == "ties":
        return (noise * 6).round() / 2
    if kind == "masked":  # a grammar leaves a few tokens, in one row a single one
        noise[torch.rand(rows, vocab, device="cuda") > 0.002] = float("-inf")
        noise[0, 1:] = float("-inf")
        noise[0, 0] = 1.0
        return noise
    ranks = torch.rand(rows, vocab, device="cuda").argsort(1) + 1
    steepness = 1.0 + torch.rand(rows, 1, device="cuda")
    return 20 - steepness * ranks.log() + noise / 4


def make_batch(rows: int, settings: list[tuple[float, int, float, float]]) -> SampleBatch:
    temperature, top_k, top_p, min_p = zip(*(settings[i % len(settings)] for i in range(rows)))
    floats = partial(torch.tensor, dtype=torch.float32, device="cuda")
    return SampleBatch(
        floats(temperature), torch.tensor(top_k, dtype=torch.int32, device="cuda"), floats(top_p), floats(min_p),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda"),
        position=torch.randint(0, 10_000, (rows,), device="cuda"),
        all_greedy=False,
        any_filter=True,
    )  # fmt: skip


def case(
    rows: int, vocab: int, kind: str, settings: list[tuple[float, int, float, float]]
) -> tuple[torch.Tensor, SampleBatch]:
    return make_logits(rows, vocab, kind), make_batch(rows, settings)


# Checks


def check_all(before: Sample | None) -> bool:
    wrong = excused = changed = total = 0
    for vocab, kind, dtype in INPUTS:
        for name, settings in CHECKED.items():
            logits, batch = case(65, vocab, kind, settings)
            logits = logits.to(dtype)
            logits[1, vocab // 2], logits[2] = float("nan"), float("-inf")
            tokens = on_poisoned_memory(logits, batch)
            expected = reference.sample(logits.float(), batch)
            rows = (tokens != expected).nonzero().flatten().tolist()
            bad = [row for row in rows if not may_differ(logits[row].float(), batch, row, tokens[row], expected[row])]
            wrong += len(bad)
            excused += len(rows) - len(bad)
            total += len(tokens)
            if bad:
                print(f"WRONG {vocab} {kind} {name}: rows {bad[:8]}: {tokens[bad[:8]].tolist()}", flush=True)
            for begin, end in ((0, 1), (4, 5), (8, 24)):  # the same in another batch
                if not torch.equal(sample(logits[begin:end], slice_of(batch, begin, end)), tokens[begin:end]):
                    wrong += 1
                    print(f"WRONG {vocab} {kind} {name}: rows {begin}:{end} depend on their batch", flush=True)
            changed += 0 if before is None else int((before(logits, batch) != tokens).sum())
    print(f"{total} tokens: {wrong} wrong, {excused} differ from the reference by rounding", end="")
    print(f", {changed} differ from before" if before else "", flush=True)
    return wrong > 0


def on_poisoned_memory(logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    """Fresh tensors are full of NaN, so that something which nobody wrote is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    tokens = sample(logits, batch)
    torch.use_deterministic_algorithms(False)
    return tokens


def slice_of(batch: SampleBatch, begin: int, end: int) -> SampleBatch:
    values: dict[str, Any] = {k: v[begin:end] if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    return SampleBatch(**values)


def may_differ(
    logits: torch.Tensor,  # [vocab] float32
    batch: SampleBatch,
    row: int,
    token: torch.Tensor,  # []
    expected: torch.Tensor,  # []
) -> bool:
    """Whether rounding decides: two noisy values next to each other, or a token at the very edge of a filter."""
    if batch.temperature[row] < 1e-5 or token < 0 or expected < 0:
        return False
    y = logits / batch.temperature[row]
    noisy = y + gumbel_noise(batch.seed[row : row + 1], batch.position[row : row + 1], len(y))[0]
    if abs(noisy[token] - noisy[expected]) < CLOSE:
        return True
    keep = int(batch.top_k[row]) or len(y)
    exact = y.double().masked_fill(y < y.topk(min(keep, len(y))).values[-1], float("-inf")).softmax(0)
    for chosen in (token, expected):
        above = exact[y > y[chosen]].sum()
        likely = y.max() + batch.min_p[row].log()
        if abs(above - batch.top_p[row]) < CLOSE or abs(y[chosen] - likely) < CLOSE:
            return True
    return False


# Timing


class Timer:
    """Times a call in graphs that share one pool of memory."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.first = self.capture(lambda: torch.zeros(1 << 24, device="cuda"))  # keeps the pool

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            work()
            graph.capture_end()
        return graph

    def microseconds(self, call: Sample, copies: list[torch.Tensor], batch: SampleBatch) -> float:
        """One call, from a graph of calls over all copies of the logits."""
        call(copies[0], batch)
        graph = self.capture(lambda: [call(logits, batch) for logits in copies])
        graph.replay()
        best = float("inf")
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1000 / len(copies))
        return best


def copies_of(rows: int, kind: str) -> list[torch.Tensor]:
    count = max(3, min(64, ROTATE_BYTES // (4 * rows * VOCAB)))
    return list(make_logits(rows * count, VOCAB, kind).view(count, rows, VOCAB))


def where_the_time_goes() -> None:
    from torch.profiler import ProfilerActivity, profile

    print("\n64 rows, us per kernel (not in a graph)", flush=True)
    for kind in ("real", "flat"):
        copies = copies_of(64, kind)
        for name in ("k40 p.9", "p.9", "min .05"):
            batch = make_batch(64, FILTERS[name])
            sample(copies[0], batch)
            with profile(activities=[ProfilerActivity.CUDA]) as made:
                for logits in copies:
                    sample(logits, batch)
                torch.cuda.synchronize()
            spent: dict[str, list[float]] = defaultdict(list)
            for event in made.events() or []:
                if "_kernel" in event.name:
                    spent[event.name].append(float(event.device_time))
            parts = [f"{key.strip('_')} {sum(v) / len(copies):.1f} (most {max(v):.1f})" for key, v in spent.items()]
            print(f"{kind} {name:8} {'  '.join(parts)}", flush=True)


def sweep(timer: Timer, shapes: list[FilterShape]) -> None:
    picks = [
        ("real", 64, "k40 p.9"),
        ("real", 64, "p.9"),
        ("flat", 64, "p.9"),
        ("real", 1, "k40 p.9"),
        ("real", 1, "p.9"),
    ]
    columns: list[list[float]] = []
    for kind, rows, name in picks:
        copies, batch = copies_of(rows, kind), make_batch(rows, FILTERS[name])
        columns.append([timer.microseconds(partial(shaped, shape), copies, batch) for shape in shapes])
    print("\nsweep, us: " + " | ".join(f"{kind} {rows} {name}" for kind, rows, name in picks), flush=True)
    for i, shape in enumerate(shapes):
        print("  ".join(f"{column[i]:7.1f}" for column in columns) + f"  {compact(shape)}", flush=True)
    best = [compact(shapes[column.index(min(column))]) for column in columns]
    print("best: " + " | ".join(best), flush=True)


def compact(shape: FilterShape) -> str:
    changes: dict[str, Any] = {k: v for k, v in shape._asdict().items() if v != getattr(USUAL, k)}
    return " ".join(f"{k}={v}" for k, v in changes.items()) or "usual"


def table(timer: Timer, before: Sample | None) -> None:
    print(f"\nus per call, {VOCAB} tokens, float32 (TB/s of logits read once)", flush=True)
    print(f"{'logits':6} {'filter':8}" + "".join(f"{rows:>7} rows{' before' if before else '':>9}" for rows in ROWS))
    for kind in ("real", "flat"):
        inputs = {rows: copies_of(rows, kind) for rows in ROWS}
        for name, settings in FILTERS.items():
            line = f"{kind:6} {name:8}"
            for rows, copies in inputs.items():
                batch = make_batch(rows, settings)
                us = timer.microseconds(sample, copies, batch)
                line += f"{us:7.1f} {4 * rows * VOCAB / us / 1e6:4.2f}"
                line += f"{timer.microseconds(before, copies, batch):9.1f}" if before else " " * 9
            print(line, flush=True)
        del inputs


if __name__ == "__main__":
    sys.exit(main())
