"""On a CUDA machine: check the products of few rows and of float8 weights, and time them against the library.

    python scripts/gpu_gemm.py                # check, then time bf16 and fp8, with a sweep of launch shapes
    python scripts/gpu_gemm.py --only fp8     # or bf16, check

Each time is one launch inside a CUDA graph that walks over several copies of the weight, so that the cache holds none.
TB/s are of weights, against 4.25 measured on an H200. A line ends in SLOWER where the rule picks our kernel and the
library is ahead, and in MISSED where it is the other way round.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenmill.ops import reference
from tokenmill.ops.registry import Need, select
from tokenmill.ops.triton.activation import act_mul
from tokenmill.ops.triton.gemm.quantize import act_mul_quantized, add_rms_norm_quantized, quantize_rows
from tokenmill.ops.triton.gemm.small import (
    GemmShape,
    GemvShape,
    choose_shape,
    counters_for,
    fastest_rows,
    small_gemm,
)
from tokenmill.ops.types import QuantizedRows
from tokenmill.quant.schemes.handover import act_mul_for, add_norm_for
from tokenmill.quant.schemes.row_scaled import Fp8
from tokenmill.quant.schemes.scheme import Linear

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
ROTATE_BYTES = 320 << 20  # several times the L2
QWEN = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]  # columns, inner
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
ROWS = [1, 2, 4, 8, 16, 32, 64]

Shape = GemvShape | GemmShape
# Which kernel: 16 (weight and input bf16), 8 (weight float8) or 88 (both float8).
SWEEP: dict[int, dict[int, list[tuple[int, int, int, int]]]] = {  # kind -> rows of a tile -> block_n, k, warps, stages
    16: {
        16: [(64, 128, 4, 5), (64, 64, 4, 8), (128, 64, 4, 5), (64, 256, 4, 4)],
        64: [(64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 8, 4), (128, 128, 8, 4)],
    },
    8: {
        16: [(64, 128, 4, 6), (64, 256, 4, 5), (128, 128, 8, 5), (128, 128, 4, 5)],
        64: [(64, 128, 4, 4), (128, 64, 8, 6), (128, 128, 8, 4), (128, 128, 8, 3)],
    },
    88: {
        16: [(64, 256, 4, 5), (64, 128, 4, 8), (64, 512, 4, 4)],
        64: [(64, 256, 4, 4), (64, 256, 4, 6), (64, 128, 4, 6), (128, 128, 8, 4)],
        128: [(64, 128, 4, 4), (64, 256, 4, 4), (128, 128, 8, 5), (128, 256, 8, 3)],
    },
}
ITEMSIZES = {16: (2, 2), 8: (2, 1), 88: (1, 1)}  # of the input and the weight
SPLITS = (1, 2, 4)
GEMV: dict[int, list[tuple[int, int, int]]] = {  # kind -> block_n, block_k, warps
    16: [(1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (2, 512, 2), (4, 512, 2), (8, 256, 1)],
    8: [(1, 2048, 4), (2, 2048, 4), (4, 1024, 2), (2, 1024, 2), (4, 512, 1), (2, 1024, 4)],
}
CHECK_ROWS = (1, 2, 7, 33, 64, 100, 200)


@dataclass
class Case:
    """A weight in several copies, and an input."""

    rows: int
    columns: int
    inner: int
    kind: int

    def __post_init__(self) -> None:
        itemsize = 2 if self.kind == 16 else 1
        copies = max(2, min(64, ROTATE_BYTES // (self.columns * self.inner * itemsize)))
        made = torch.empty(copies, self.columns, self.inner, dtype=BF16, device="cuda").normal_(0, self.inner**-0.5)
        self.x = torch.randn(self.rows, self.inner, device="cuda", dtype=BF16)
        self.counters = torch.zeros(counters_for(self.columns), dtype=torch.int32, device="cuda")
        self.scale = torch.rand(self.columns, device="cuda") + 0.5
        self.weights = made if self.kind == 16 else (made * 50).to(FLOAT8)

    def resized(self, rows: int) -> Case:
        self.rows, self.x = rows, torch.randn(rows, self.inner, device="cuda", dtype=BF16)
        return self

    def ours(self, weight: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
        if self.kind == 16:
            return small_gemm(self.x, weight, counters=self.counters, shape=shape)
        if self.kind == 8:
            return small_gemm(self.x, weight, scale=self.scale, counters=self.counters, shape=shape)
        x, x_scale = quantize_rows(self.x)
        return small_gemm(x, weight, scale=self.scale, x_scale=x_scale, counters=self.counters, dtype=BF16, shape=shape)

    def library(self, weight: torch.Tensor) -> torch.Tensor:
        if self.kind == 16:
            return F.linear(self.x, weight)
        x, x_scale = quantize_rows(self.x)
        return torch._scaled_mm(
            x, weight.t(), x_scale[:, None], self.scale[None, :], out_dtype=BF16, use_fast_accum=True
        )

    def exact(self, weight: torch.Tensor) -> torch.Tensor:
        out = self.x.double() @ weight.double().T
        return out if self.kind == 16 else out * self.scale.double()

    def shapes(self) -> list[Shape]:
        if self.rows == 1 and self.kind in GEMV:
            return [GemvShape(n, k, warps) for n, k, warps in GEMV[self.kind] if self.inner % k == 0]
        tiles = SWEEP[self.kind]
        if 16 < self.rows <= 32:
            return []  # a tile of its own, which would double what has to be compiled
        block_m = next((m for m in tiles if self.rows <= m), max(tiles))
        return [
            GemmShape(n, k, splits, warps, stages)
            for n, k, warps, stages in tiles[block_m]
            for splits in SPLITS
            if self.inner % (2 * splits * k) == 0 and (splits == 1 or self.columns // n * splits <= 900)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("check", "bf16", "fp8"))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile and check")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    kinds = {"bf16": [16], "fp8": [8, 88], "check": [], None: [16, 8, 88]}[arguments.only]
    failed = prepare(kinds, arguments.jobs)
    print(f"checks {'FAILED' if failed else 'passed'}, compiled ({time.perf_counter() - begun:.0f} s)", flush=True)
    gc.disable()  # a collection would wait inside a capture
    timer = Timer()
    if 16 in kinds:
        table(timer, "bf16: cuBLAS / rule / best of the sweep, us", 16, [*QWEN, *LLAMA], ROWS)
    if 8 in kinds:
        table(timer, "fp8 weights, bf16 input: quantize + _scaled_mm / rule / best", 8, LLAMA[:4], ROWS)
        table(timer, "fp8 both: quantize + _scaled_mm / quantize + rule / best", 88, LLAMA[:4], [16, 64, 96, 128, 256])
        large(timer)
        layers(timer)
    print(f"done in {time.perf_counter() - begun:.0f} s", flush=True)
    return int(failed)


# Compilation and checks

Task = tuple[int, int, int, int, Shape | None]  # kind, rows, columns, inner; a shape to compile, or None for a check


def prepare(kinds: Iterable[int], jobs: int) -> bool:
    """Fill Triton's cache from several processes, which check as well: one after the other would take minutes."""
    tasks: set[Task] = {
        (kind, rows, columns, inner, None)
        for kind in (16, 8, 88)
        for rows in CHECK_ROWS
        for columns, inner in ((4096, 4096), (1000, 640))
    }
    for kind in kinds:
        for block_m, shapes in SWEEP[kind].items():
            tasks |= {task(kind, block_m, GemmShape(n, k, s, w, st)) for n, k, w, st in shapes for s in SPLITS}
        tasks |= {task(kind, 1, GemvShape(*shape)) for shape in GEMV.get(kind, [])}
        itemsizes, device = ITEMSIZES[kind], torch.device("cuda", 0)
        for columns, inner in [*QWEN, *LLAMA] if kind == 16 else LLAMA[:4]:
            for rows in (1, 16, 32, 64, 128):
                shape = choose_shape(rows, columns, inner, *itemsizes, device, may_split=True)
                tasks.add(task(kind, rows, shape))
    parts = sorted(tasks, key=repr)
    failed = False
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for failures in pool.map(run_tasks, [parts[first::jobs] for first in range(jobs)]):
            for failure in failures:
                failed = True
                print(failure, flush=True)
    return failed


def task(kind: int, rows: int, shape: Shape) -> Task:
    return kind, rows, 512, 2 * shape.block_k * (shape.splits if isinstance(shape, GemmShape) else 1), shape


def run_tasks(tasks: list[Task]) -> list[str]:
    failures = []
    for kind, rows, columns, inner, shape in tasks:
        what = f"kind {kind}, {rows} x {columns} x {inner}" + (f", {compact(shape)}" if shape else "")
        try:
            complaint = check(Case(rows, columns, inner, kind), shape)
        except Exception as error:
            complaint = f"{type(error).__name__}: {str(error)[:150]}"
        if complaint:
            failures.append(f"FAILED {what}: {complaint}")
    return failures + check_quantized()


def check_quantized() -> list[str]:
    failures = []
    for rows, inner in ((3, 4096), (1000, 14336), (5, 100)):
        x = torch.randn(rows, 2 * inner, device="cuda", dtype=BF16)
        half, gain = x[:, :inner].contiguous(), torch.rand(inner, device="cuda", dtype=BF16)
        normed, _ = reference.add_rms_norm(half, half, gain, 1e-5)
        results = {
            "rows": (half, quantize_rows(half)),
            "norm": (normed, add_rms_norm_quantized(half.clone(), half.clone(), gain, 1e-5)[:2]),
            "activation": (reference.act_mul(x, "silu"), act_mul_quantized(x, "silu")),
        }
        for name, (exact, (values, scale)) in results.items():
            moved = ((values.float() * scale[:, None] - exact.float()).norm() / exact.float().norm()).item()
            if not moved < 0.035:
                failures.append(f"FAILED quantized {name} {rows} x {inner}: error {moved:.4f}")
    return failures


def check(case: Case, shape: Shape | None) -> str:
    weight = case.weights[0]
    got, exact = case.ours(weight, shape), case.exact(weight)
    error = ((got.double() - exact).norm() / exact.norm()).item()
    if not error < (0.004 if case.kind != 88 else 0.05):  # half a unit of bf16; or an input of three bits
        return f"error {error:.5f}"
    if not all(torch.equal(case.ours(weight, shape), got) for _ in range(5)):
        return "another result in another run"
    return "counters are not back at zero" if case.counters.any() else ""


# Timing


def call_all(call: Callable[[torch.Tensor], object], weights: torch.Tensor, turns: int) -> None:
    for _ in range(turns):
        for weight in weights:
            call(weight)


class Timer:
    """Times a call in graphs that share one pool of memory."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.first = self.capture(lambda: torch.zeros(1 << 26, device="cuda"))  # keeps the pool

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            work()
            graph.capture_end()
        return graph

    def microseconds(self, call: Callable[[torch.Tensor], object], weights: torch.Tensor) -> float:
        """One call, from a graph of calls over all copies of the weight."""
        try:
            call(weights[0])
        except Exception:
            return float("nan")  # more shared memory than there is, or a shape that the library refuses
        turns = max(1, 24 // weights.shape[0])
        graph = self.capture(partial(call_all, call, weights, turns))
        best = float("inf")
        graph.replay()
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1000 / (turns * weights.shape[0]))
        return best


def table(timer: Timer, title: str, kind: int, sizes: list[tuple[int, int]], rows_list: list[int]) -> None:
    print(f"\n{title}\n{'columns x inner':>15} rows  library    rule TB/s    best TB/s  shape of the best", flush=True)
    for columns, inner in sizes:
        case = Case(1, columns, inner, kind)
        total = columns * inner * case.weights.itemsize
        for rows in rows_list:
            case.resized(rows)
            library = timer.microseconds(case.library, case.weights)
            rule = timer.microseconds(case.ours, case.weights)
            calls = {shape: partial(case.ours, shape=shape) for shape in case.shapes()}
            tried = {shape: timer.microseconds(call, case.weights) for shape, call in calls.items()}
            chosen = choose_shape(rows, columns, inner, *ITEMSIZES[kind], case.x.device, may_split=True)
            tried = {shape: us for shape, us in tried.items() if us == us} or {chosen: rule}
            shape = min(tried, key=lambda one: tried[one])
            best = min(tried[shape], rule)
            remark = "as ruled" if rule <= 1.02 * tried[shape] else compact(shape) + f" (rule {compact(chosen)})"
            if kind == 16:
                ours = any(first <= rows <= last for first, last in fastest_rows(columns, inner))
                if ours and rule > 1.01 * library:
                    remark += " SLOWER"
                if not ours and rule < 0.97 * library:
                    remark += " MISSED"
            print(
                f"{columns:>7} x {inner:<5} {rows:>4} {library:>8.1f} {rule:>7.1f} {total / rule / 1e6:4.2f} "
                f"{best:>7.1f} {total / best / 1e6:4.2f}  {remark}",
                flush=True,
            )
        del case


def compact(shape: Shape) -> str:
    if isinstance(shape, GemvShape):
        return f"v{shape.block_n}x{shape.block_k}w{shape.num_warps}"
    return f"{shape.block_n}x{shape.block_k}/{shape.splits} w{shape.num_warps}s{shape.num_stages}"


def large(timer: Timer) -> None:
    print("\nmany rows: quantize us (TB/s), then the product us (TFLOP/s of 1310)", flush=True)
    for columns, inner in LLAMA[:4]:
        case = Case(1, columns, inner, 88)
        for rows in (256, 2048, 16384):
            case.resized(rows)
            x, x_scale = quantize_rows(case.x)
            beside = {"scale": case.scale, "counters": case.counters}
            product = timer.microseconds(partial(multiply, QuantizedRows(x, x_scale, BF16), beside), case.weights[:4])
            quantize = timer.microseconds(partial(quantize_case, case), case.weights[:2])
            flops = 2 * rows * columns * inner
            print(
                f"{columns:>7} x {inner:<5} {rows:>5} {quantize:7.1f} ({3 * rows * inner / quantize / 1e6:4.2f})"
                f" {product:8.1f} ({flops / product / 1e6:5.0f})",
                flush=True,
            )

    gate_up = torch.randn(16384, 28672, device="cuda", dtype=BF16)
    once = gate_up[:1, None]  # nothing to rotate
    apart = timer.microseconds(lambda _: quantize_rows(act_mul(gate_up, "silu")), once)
    fused = timer.microseconds(lambda _: act_mul_quantized(gate_up, "silu"), once)
    print(f"activation of 16384 rows: {apart:.0f} us, then quantized; {fused:.0f} us fused", flush=True)


class Layers:
    """The products of layers of Llama-3-8B with what stands between them, attention left out."""

    def __init__(self, rows: int, stacks: list[list[Linear]], fused: bool) -> None:
        self.ops, self.stacks, self.fused = select(Need("cuda", BF16)), stacks, fused
        self.update, self.residual = (torch.randn(rows, 4096, device="cuda", dtype=BF16) for _ in range(2))
        self.gain = torch.ones(4096, device="cuda", dtype=BF16)

    def __call__(self, number: torch.Tensor) -> None:
        qkv, o, gate_up, down = self.stacks[int(number)]
        self.update = o(qkv(self.normed(qkv))[:, :4096])
        wide = gate_up(self.normed(gate_up))
        active = act_mul_for(down, self.ops, wide, "silu") if self.fused else self.ops.act_mul(wide, "silu")
        self.update = down(active)

    def normed(self, reader: Linear) -> torch.Tensor | QuantizedRows:
        asked = reader if self.fused else None
        x, self.residual = add_norm_for(asked, self.ops, self.update, self.residual, self.gain, 1e-5)
        return x


def layers(timer: Timer) -> None:
    print("\none fp8 layer without attention, us: quantized apart, fused (bytes of weights: 51.3)", flush=True)
    scheme, cuda = Fp8(), torch.device("cuda", 0)
    stacks = []
    for _ in range(3):  # several times the L2
        stack = []
        for columns, inner in LLAMA[:4]:
            storage = scheme.allocate(columns, inner, BF16, cuda)
            scheme.write(storage, 0, torch.randn(columns, inner, device="cuda", dtype=BF16) * inner**-0.5)
            stack.append(Linear(scheme, storage))
        stacks.append(stack)
    numbers = torch.arange(len(stacks))[:, None]
    for rows in (1, 2, 8, 16, 32, 64, 128, 256, 512, 8192):
        apart, fused = (timer.microseconds(Layers(rows, stacks, way), numbers) for way in (False, True))
        print(f"{rows:>6} rows {apart:9.1f} {fused:9.1f}", flush=True)


def multiply(x: QuantizedRows, beside: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
    Linear(Fp8(), {"weight": weight, **beside})(x)


def quantize_case(case: Case, weight: torch.Tensor) -> None:
    quantize_rows(case.x)


if __name__ == "__main__":
    sys.exit(main())
