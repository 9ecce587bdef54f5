"""On a CUDA machine: check products with int4, int8 and float8 weights, and time them against bf16.

    python scripts/gpu_weight_only.py                # check, then time, with a sweep of launch shapes
    python scripts/gpu_weight_only.py --only check   # or int4, forms, many, layers

Each time is one launch inside a CUDA graph that walks over several copies of the weight, so that the cache holds none.
TB/s are of codes, scales and zeros, against 4.25 measured on an H200.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_gemm import Layers, Timer

from tokenmill.ops.triton.gemm.small import GemmShape, counters_for
from tokenmill.ops.triton.gemm.weight_codes import TILE, Codes, parts_of
from tokenmill.ops.triton.gemm.weight_only import _rows_of_a_tile, choose_shape, weight_only_gemm, widened
from tokenmill.ops.triton.gemm.weight_only_few import FewShape
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.row_scaled import Fp8
from tokenmill.quant.schemes.scheme import Linear, QuantScheme
from tokenmill.quant.schemes.weight_only import WeightOnly

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)
ROTATE_BYTES = 256 << 20  # several times the L2
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # columns, inner
HEAD_BYTES = 128256 * 4096 * 2
ROWS = [1, 4, 8, 16, 32, 64]
LAYER_ROWS = [1, 4, 8, 16, 32, 64, 128]
PEAK = 4.25  # TB/s

Shape = FewShape | GemmShape
INT4 = WeightForm("int4", 128)
OTHERS = [
    WeightForm("int4", 128, True),
    WeightForm("int4", 32),
    WeightForm("int4", 32, True),
    WeightForm("int8"),
    WeightForm("fp8", 128),
]
# bands, warps, depth, and registers where programs are so many that they do not all run at once
FEW = [(1, 4, 4), (1, 4, 2), (1, 8, 2), (1, 8, 4), (1, 4, 8), (1, 16, 1), (2, 4, 1), (2, 4, 2), (2, 8, 1), (4, 4, 1)]
FEW_OF_MANY = [(1, 4, 4, 80), (1, 4, 4, 88), (1, 4, 2, 80), (2, 4, 1, 96), (2, 4, 2, 144), (2, 2, 2, 144),
               (4, 4, 1, 144), (4, 2, 1, 128), (1, 4, 8, 168)]  # fmt: skip
GEMM: dict[int, list[tuple[int, int, int, int]]] = {  # rows of a tile -> block_n, steps, warps, stages
    16: [(64, 2, 4, 4), (64, 4, 4, 3), (64, 2, 4, 6)],
    32: [(64, 2, 4, 3), (128, 2, 8, 3)],
    64: [(64, 1, 4, 4), (128, 1, 8, 4)],
}
SPLITS = (1, 4)


class Case:
    """A random matrix of a form in several copies, and an input."""

    def __init__(self, form: WeightForm, rows: int, columns: int, inner: int, copies: int | None = None) -> None:
        self.form, self.columns, self.inner = form, columns, inner
        self.scheme = WeightOnly(form)
        self.total = self.scheme.nbytes(columns, inner, BF16)
        copies = copies or max(2, min(48, ROTATE_BYTES // self.total))
        tiles, groups = inner // (TILE * parts_of(form.kind)), inner // (form.group or inner)
        size = (copies, columns // TILE, tiles, TILE**2)
        words = torch.randint(-(1 << 15), 1 << 15, size, device=CUDA, dtype=torch.int16)
        if form.kind == "fp8":
            words &= ~0x4040  # no NaN, and nothing that outweighs all others
        scale = torch.rand(copies, columns // TILE, groups, TILE, device=CUDA) / inner + 0.1 / inner
        zeros = [None] * copies if not form.zeros else torch.randint(-8, 8, scale.shape, device=CUDA, dtype=torch.int8)
        self.codes = [Codes(words[i], scale[i], zeros[i], form.kind) for i in range(copies)]
        self.numbers = torch.arange(copies)[:, None]  # what the timer walks over
        self.counters = torch.zeros(counters_for(columns), dtype=torch.int32, device=CUDA)
        self.resize(rows)

    def resize(self, rows: int) -> None:
        self.x = torch.randn(rows, self.inner, device=CUDA, dtype=BF16)

    def ours(self, number: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
        return weight_only_gemm(self.x, self.codes[int(number)], counters=self.counters, shape=shape)

    def through_floats(self, number: torch.Tensor) -> torch.Tensor:
        return F.linear(self.x, widened(self.codes[int(number)], self.x.dtype))

    def widen(self, number: torch.Tensor) -> torch.Tensor:
        return widened(self.codes[int(number)], BF16)

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        codes = self.codes[0]
        storage = {"weight": codes.words, "scale": codes.scale}
        storage |= {} if codes.zeros is None else {"zeros": codes.zeros}
        return self.scheme.groups(storage).widen(dtype)

    def ruled(self) -> Shape:
        codes = self.codes[0]
        bands, tiles, _ = codes.words.shape
        return choose_shape(self.x.shape[0], bands, tiles, codes.step, codes.kind, CUDA, may_split=True)


def shapes_for(rows: int, columns: int, inner: int) -> list[Shape]:
    """Of int4-g128: what is worth a try."""
    wide = columns > 16384
    few = [] if rows > 4 else FEW if not wide else [*FEW_OF_MANY, *FEW[:1]]
    made: list[Shape] = [FewShape(*shape) for shape in few]
    made += [
        GemmShape(n, 2 * k, splits, warps, stages)
        for n, k, warps, stages in GEMM[_rows_of_a_tile(rows)]
        for splits in SPLITS
        if inner // 128 % k == 0 and wide == (splits == 1)
    ]
    return made


def compact(shape: Shape) -> str:
    if isinstance(shape, FewShape):
        registers = f"r{shape.registers}" if shape.registers else ""
        return f"{shape.bands}b{shape.num_warps}w{shape.depth}{registers}"
    return f"{shape.block_n}x{shape.block_k}/{shape.splits} w{shape.num_warps}s{shape.num_stages}"


# Compilation and checks

Task = tuple[WeightForm, int, int, int, Shape | None, torch.dtype]


def prepare(only: str | None, jobs: int) -> bool:
    """Fill Triton's cache from several processes, which check as well: one after the other would take minutes."""
    tasks: list[Task] = []
    if only in (None, "check", "forms"):
        tasks += [
            (form, rows, columns, inner, None, dtype)
            for form in [INT4, *OTHERS]
            for dtype in (BF16, torch.float16)
            for rows in ((1, 3, 11, 33, 100) if dtype == BF16 else (1, 40))
            for columns, inner in ((4096, 4096), (1008, 640))
            if dtype == BF16 or inner == 640
        ]
    if only in (None, "int4"):
        tasks += [
            (INT4, rows, columns, inner, shape, BF16)
            for columns, inner in LLAMA
            for rows in ROWS[1:]
            for shape in [None, *shapes_for(rows, columns, inner)]
        ]
    if only in (None, "layers"):
        sizes = [(form, rows, size) for form in (INT4, WeightForm("int8")) for rows in LAYER_ROWS for size in LLAMA]
        tasks += [(form, rows, columns, inner, None, BF16) for form, rows, (columns, inner) in sizes]
    if only in (None, "forms"):
        tasks += [(form, 1, *size, shape, BF16) for form in OTHERS for size in LLAMA[1:3] for shape in few_of(size)]
    # What compiles alike goes to the same process.
    heaps: list[list[Task]] = [[] for _ in range(jobs)]
    kinds: dict[str, int] = {}
    for task in tasks:
        form, rows, columns, inner, shape, dtype = task
        key = f"{form.name} {_rows_of_a_tile(rows)} {shape} {dtype}"
        key += "" if isinstance(shape, GemmShape) else f" {columns} {inner}"
        heaps[kinds.setdefault(key, len(kinds)) % jobs].append(task)
    failed = False
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for failures in pool.map(run_tasks, heaps):
            for failure in failures:
                failed = True
                print(failure, flush=True)
    return failed


def run_tasks(tasks: list[Task]) -> list[str]:
    failures = []
    for form, rows, columns, inner, shape, dtype in tasks:
        what = f"{form.name}, {rows} x {columns} x {inner}, {dtype}" + (f", {compact(shape)}" if shape else "")
        try:
            complaint = check(Case(form, rows, columns, inner, copies=1), shape, dtype)
        except Exception as error:
            complaint = f"{type(error).__name__}: {str(error)[:150]}"
        if complaint:
            failures.append(f"FAILED {what}: {complaint}")
    return failures


def check(case: Case, shape: Shape | None, dtype: torch.dtype) -> str:
    case.x = case.x.to(dtype)
    first = case.numbers[0]
    got = case.ours(first, shape)
    exact = case.x.double() @ case.plain(torch.float64).T
    error = ((got.double() - exact).norm() / exact.norm()).item()
    if not error < (0.002 if dtype == BF16 else 0.0004):  # the rounding of the result
        return f"error {error:.5f}"
    if not all(torch.equal(case.ours(first, shape), got) for _ in range(3)):
        return "another result in another run"
    if case.counters.any():
        return "counters are not back at zero"
    if shape is None and not torch.equal(widened(case.codes[0], dtype), case.plain(dtype)):
        return "widened to other values"
    return ""


# Timing


def int4_table(timer: Timer) -> None:
    print("\nint4-g128, us: bf16 as it is multiplied now, the rule, the best of the sweep (TB/s, part of 4.25)")
    print("columns x inner rows     bf16     rule TB/s         best TB/s        shape of the best", flush=True)
    for columns, inner in LLAMA:
        case = Case(INT4, 1, columns, inner)
        dense = torch.randn(8, columns, inner, device=CUDA, dtype=BF16)
        for rows in ROWS:
            case.resize(rows)
            plain = timer.microseconds(partial(multiply_dense, case.x, case.counters), dense)
            rule = timer.microseconds(case.ours, case.numbers)
            tried = {
                s: timer.microseconds(partial(case.ours, shape=s), case.numbers)
                for s in shapes_for(rows, columns, inner)
            }
            ranked = sorted((us, compact(shape)) for shape, us in tried.items() if us == us)
            best = min(rule, ranked[0][0])
            next_best = ", ".join(f"{name} {us:.1f}" for us, name in ranked[1:8])
            print(
                f"{columns:>7} x {inner:<5} {rows:>4} {plain:>8.1f} {rule:>8.1f} {rate(case, rule)} {best:>8.1f} "
                f"{rate(case, best)}  {ranked[0][1]} {ranked[0][0]:.1f} ({next_best}) rule {compact(case.ruled())}",
                flush=True,
            )
        del case, dense


def multiply_dense(x: torch.Tensor, counters: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Linear(Dense(), {"weight": weight, "counters": counters})(x)


def rate(case: Case, us: float) -> str:
    speed = case.total / us / 1e6
    return f"{speed:4.2f} {speed / PEAK:4.0%}"


def few_of(size: tuple[int, int]) -> list[Shape]:
    """Of other forms than int4-g128, for one row."""
    found = [(1, 4, 4), (1, 8, 2), (1, 4, 2), (2, 4, 1)]
    return [FewShape(*shape, 104 if size[0] > 16384 else None) for shape in found]


def forms_table(timer: Timer) -> None:
    print("\nother forms by rule, us (part of 4.25 TB/s); rows 1, 8, 32, 64; the best shape for one row", flush=True)
    for form in OTHERS:
        for columns, inner in LLAMA[1:3]:
            case = Case(form, 1, columns, inner)
            tried = [
                (timer.microseconds(partial(case.ours, shape=s), case.numbers), s) for s in few_of((columns, inner))
            ]
            best, shape = min((pair for pair in tried if pair[0] == pair[0]), key=lambda pair: pair[0])
            line = f"{form.name:>15} {columns:>6} x {inner:<5}"
            for rows in (1, 8, 32, 64):
                case.resize(rows)
                us = timer.microseconds(case.ours, case.numbers)
                line += f" {us:7.1f} ({case.total / us / 1e6 / PEAK:4.0%})"
            print(f"{line}  {compact(shape)} {best:.1f}", flush=True)
            del case


def many_table(timer: Timer) -> None:
    print("\nmany rows, int4-g128, us: codes in registers / widened, then the library / bf16 there", flush=True)
    for columns, inner in LLAMA:
        case = Case(INT4, 1, columns, inner, copies=8)
        dense = torch.randn(4, columns, inner, device=CUDA, dtype=BF16)
        us = timer.microseconds(case.widen, case.numbers)
        moved = case.total + columns * inner * 2
        print(f"{columns:>7} x {inner:<5} widening alone {us:7.1f} us, {moved / us / 1e6:4.2f} TB/s", flush=True)
        for rows in (64, 96, 128, 192, 256):
            case.resize(rows)
            ours = timer.microseconds(case.ours, case.numbers)
            through = timer.microseconds(case.through_floats, case.numbers)
            library = timer.microseconds(partial(F.linear, case.x), dense)
            mark = "  ours" if ours < through else "  WIDEN"
            print(f"{rows:>22} rows {ours:8.1f} {through:8.1f} {library:8.1f}{mark}", flush=True)
        del case, dense


def layers_table(timer: Timer) -> None:
    print("\none layer of Llama-3-8B without attention, us; then 32 of them with a bf16 head at 4 TB/s, ms", flush=True)
    schemes: dict[str, QuantScheme] = {
        "bf16": Dense(), "fp8": Fp8(), "int8": WeightOnly(WeightForm("int8")), "int4-g128": WeightOnly(INT4),
    }  # fmt: skip
    head = HEAD_BYTES / 4e6
    for name, scheme in schemes.items():
        copies = 3 if name in ("bf16", "fp8") else 6
        stacks = [[linear(scheme, columns, inner) for columns, inner in LLAMA] for _ in range(copies)]
        numbers = torch.arange(copies)[:, None]
        line = f"{name:>16}"
        for rows in LAYER_ROWS:
            us = timer.microseconds(Layers(rows, stacks, True), numbers)
            line += f"  {rows}: {us:6.1f} {(32 * us + head) / 1000:5.2f}"
        print(line, flush=True)
        del stacks


def linear(scheme: QuantScheme, columns: int, inner: int) -> Linear:
    storage = scheme.allocate(columns, inner, BF16, CUDA)
    scheme.write(storage, 0, torch.randn(columns, inner, device=CUDA, dtype=BF16) * inner**-0.5)
    return Linear(scheme, storage)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = {"int4": int4_table, "forms": forms_table, "many": many_table, "layers": layers_table}
    parser.add_argument("--only", choices=("check", *parts))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile and check")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = prepare(arguments.only, arguments.jobs)
    print(f"checks {'FAILED' if failed else 'passed'}, compiled ({time.perf_counter() - begun:.0f} s)", flush=True)
    gc.disable()  # a collection would wait inside a capture
    timer = Timer()
    for name, table in parts.items():
        if arguments.only in (None, name):
            table(timer)
            print(f"({time.perf_counter() - begun:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
