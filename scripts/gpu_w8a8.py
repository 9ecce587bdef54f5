"""On a Hopper GPU: check products of int8 and of float8, and time them against bfloat16 over Llama-3-8B's layer.

    python scripts/gpu_w8a8.py                # check, then time layers, what they consist of, and products by shape
    python scripts/gpu_w8a8.py --only layers  # or check, pieces, products

Each time is a launch inside a CUDA graph that walks over several copies of the weight. Products take inputs that are
quantized already; a layer is all that happens but attention, with quantization where it happens.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from gpu_gemm import BF16, FLOAT8, LLAMA, Layers, Timer, call_all  # which finds the package

from tokenmill.ops.matmul import select_matmul
from tokenmill.ops.matmul_torch import quantize_rows
from tokenmill.ops.triton.gemm import hopper, matmul, quantize
from tokenmill.ops.triton.gemm.hopper import BLOCK_M, SHAPES, HopperShape, choose_hopper_shape, hopper_gemm
from tokenmill.ops.triton.gemm.small import counters_for, small_gemm
from tokenmill.ops.types import QuantizedRows
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.handover import act_mul_for
from tokenmill.quant.schemes.row_scaled import W8A8, Fp8
from tokenmill.quant.schemes.scheme import Linear, QuantScheme

SIZES = LLAMA[:4]  # columns, inner
ROWS = [1, 16, 64, 128, 256, 512, 1024, 4096, 16384]
KINDS = {"int8": torch.int8, "fp8": FLOAT8}
SWEEP = [*SHAPES, HopperShape(256, 1, 4, 8), HopperShape(256, 1, 4, 32)]
PIECES = ("norms", "attention output", "activation")
PIECES_ROWS = [128, 256, 512]
QUANTIZERS = (quantize._add_norm_kernel, quantize._quantize_kernel, quantize._act_mul_kernel)
WARPS = {4096: (4, 8, 16, 32), 16384: (8, 16, 32)}  # by the block of a row
PATIENCE = 60  # seconds
FLOORS = {"bf16": 790, "fp8": 1310, "int8": 1310}  # TFLOP/s

SCHEMES: dict[str, QuantScheme] = {"bf16": Dense(), "fp8": Fp8(), "w8a8": W8A8()}

Task = tuple[str, int, int, int, HopperShape | None]


@dataclass
class Case:
    """A weight of eight bits in several copies, and an input."""

    kind: str
    rows: int
    columns: int
    inner: int
    copies: int = 1

    def __post_init__(self) -> None:
        size = self.copies * self.columns
        wide = torch.empty(size, self.inner, dtype=BF16, device="cuda").normal_()
        codes, scale = quantize.quantize_rows(wide, KINDS[self.kind])
        self.weights = codes.view(self.copies, self.columns, self.inner)
        self.scale = scale[: self.columns] * self.inner**-0.5
        self.counters = torch.zeros(counters_for(4 * self.columns), dtype=torch.int32, device="cuda")
        self.resize(self.rows)

    def resize(self, rows: int) -> None:
        x = torch.randn(rows, self.inner, device="cuda", dtype=BF16)
        self.rows, (self.x, self.x_scale) = rows, quantize.quantize_rows(x, KINDS[self.kind])

    def rule(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        storage = {"weight": weight, "scale": self.scale, "counters": self.counters}
        scheme = W8A8() if self.kind == "int8" else Fp8()
        return Linear(scheme, storage, bias)(QuantizedRows(self.x, self.x_scale, BF16))

    def small(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        given = {"scale": self.scale, "x_scale": self.x_scale, "counters": self.counters}
        return small_gemm(self.x, weight, bias, dtype=BF16, **given)

    def hopper(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, shape: HopperShape | None = None
    ) -> torch.Tensor:
        return hopper_gemm(self.x, self.x_scale, weight, self.scale, bias, self.counters, BF16, shape)

    def library(self, weight: torch.Tensor) -> torch.Tensor:
        if self.kind == "int8":
            return torch._int_mm(self.x, weight.t())  # without its scales
        scales = self.x_scale[:, None], self.scale[None, :]
        return torch._scaled_mm(self.x, weight.t(), *scales, out_dtype=BF16, use_fast_accum=True)

    def exact(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = self.x.double() @ weight.double().T * self.scale.double() * self.x_scale.double()[:, None]
        return out.add_(bias)

    def shapes(self) -> list[HopperShape]:
        row_tiles = -(-self.rows // BLOCK_M)
        found = []
        for shape in SWEEP:
            tiles = row_tiles * -(-self.columns // shape.block_n)
            if shape.splits > 1 and (2 * tiles > self.counters.numel() or tiles * shape.splits > 264):
                continue
            if shape.group != 16 and row_tiles <= 16:
                continue  # hardly another order
            found.append(shape)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("check", "layers", "pieces", "products"))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile and check")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = prepare(arguments.jobs)
    print(f"checks {'FAILED' if failed else 'passed'}, compiled ({time.perf_counter() - begun:.0f} s)", flush=True)
    gc.disable()  # a collection would wait inside a capture
    watch = Watch()
    if arguments.only in (None, "layers", "pieces"):
        stacks = {name: [stack(scheme) for _ in range(2)] for name, scheme in SCHEMES.items()}
        if arguments.only != "pieces":
            layers(watch, stacks)
        if arguments.only != "layers":
            pieces(watch, stacks)
        del stacks
    if arguments.only in (None, "products"):
        products(watch)
    print(f"done in {time.perf_counter() - begun:.0f} s", flush=True)
    return int(failed)


# Compilation and checks


def prepare(jobs: int) -> bool:
    """Fill Triton's cache from several processes, which check as well."""
    sizes = [(1, 520, 1040), (65, 4096, 1024), (129, 520, 1040), (256, 4096, 4096), (300, 1000, 4096), (2500, 520, 528)]
    tasks: list[Task] = [(kind, *size, None) for kind in KINDS for size in sizes]
    tasks += [(kind, 200, 1024, 2048, shape) for kind in KINDS for shape in SWEEP]
    tasks += [(kind, rows, columns, inner, None) for kind in KINDS for rows in (1, 16, 64) for columns, inner in SIZES]
    found = check_quantized()
    warm = [(kind, rows, columns, inner) for kind in KINDS for rows in PIECES_ROWS for columns, inner in SIZES]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            done = pool.map(compile_pieces, [warm[first::jobs] for first in range(jobs)], timeout=PATIENCE)
            for failures in pool.map(run_tasks, [tasks[first::jobs] for first in range(jobs)], timeout=PATIENCE):
                found += failures
            list(done)
        except TimeoutError:
            found.append(f"FAILED: a kernel did not end in {PATIENCE} s")
            for process in list(pool._processes.values()):
                process.kill()
    print("\n".join(found), end="\n" * bool(found), flush=True)
    return bool(found)


def compile_pieces(sizes: list[tuple[str, int, int, int]]) -> None:
    """What `pieces` launches besides the rule."""
    for kind, rows, columns, inner in sizes:
        case = Case(kind, rows, columns, inner)
        for takes_part in (True, False):
            with without_pdl(*() if takes_part else (hopper._kernel, *QUANTIZERS)):
                case.hopper(case.weights[0])
                block = 4096 if inner == 4096 else 16384
                for count in WARPS[block] if rows == PIECES_ROWS[0] else ():
                    with warps_of(block, count):
                        quantize_all(rows, inner, KINDS[kind])


def quantize_all(rows: int, inner: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * inner, device="cuda", dtype=BF16)
    if inner == 4096:
        quantize.quantize_rows(x[:, :inner], dtype)
        quantize.add_rms_norm_quantized(x[:, :inner].clone(), x[:, :inner].clone(), x[0, :inner].clone(), 1e-5, dtype)
    else:
        quantize.act_mul_quantized(x, "silu", dtype)


@contextmanager
def without_pdl(*kernels: Any) -> Iterator[None]:
    """These wait for the kernel before, and the kernel behind waits for them, as a whole."""
    for kernel in kernels:
        kernel._takes_part = False
    yield
    for kernel in kernels:
        kernel._takes_part = True


@contextmanager
def warps_of(block: int, count: int) -> Iterator[None]:
    ruled = quantize._warps
    quantize._warps = lambda size: count if size == block else ruled(size)
    yield
    quantize._warps = ruled


def run_tasks(tasks: list[Task]) -> list[str]:
    failures = []
    for kind, rows, columns, inner, shape in tasks:
        try:
            complaint = check(Case(kind, rows, columns, inner), shape)
        except Exception as error:
            complaint = f"{type(error).__name__}: {str(error)[:200]}"
        if complaint:
            failures.append(f"FAILED {kind} {rows} x {columns} x {inner} {compact(shape)}: {complaint}")
    return failures


def check(case: Case, shape: HopperShape | None) -> str:
    weight, bias = case.weights[0], torch.randn(case.columns, device="cuda", dtype=BF16)
    exact = case.exact(weight, bias)
    ways: dict[str, Callable[..., torch.Tensor]] = {"rule": case.rule, "small": case.small, "hopper": case.hopper}
    if shape is not None:
        ways = {"hopper": partial(case.hopper, shape=shape)}
    results = []
    for name, way in ways.items():
        got = way(weight, bias)
        error = ((got.double() - exact).norm() / exact.norm()).item()
        if not error < 0.003:  # half a unit of bf16, and what float8 products lose on their way
            return f"{name}: error {error:.5f}"
        if not all(torch.equal(way(weight, bias), got) for _ in range(5)):
            return f"{name}: another result in another run"
        if case.counters.any():
            return f"{name}: counters are not back at zero"
        results.append(got)
    if case.kind == "int8" and not all(torch.equal(other, results[0]) for other in results):
        return "kernels differ, though sums are exact"
    return ""


def check_quantized() -> list[str]:
    failures = []
    for (name, dtype), fixed in ((pair, fixed) for pair in KINDS.items() for fixed in (None, 0.02)):
        scale = None if fixed is None else torch.tensor(fixed, device="cuda")
        x = torch.randn(1000, 4096, device="cuda", dtype=BF16)
        values, factor = quantize.quantize_rows(x, dtype, scale)
        plain = quantize_rows(x, dtype, scale)
        off = (values.float() != plain.values.float()).float().mean().item()
        if off > 1e-3 or not torch.allclose(factor, plain.scale, rtol=1e-6):
            failures.append(f"FAILED quantized {name}, scale {fixed}: {off:.2%} of the codes differ")
    return failures


def compact(shape: HopperShape | None) -> str:
    return "" if shape is None else f"{shape.block_n}/{shape.splits} s{shape.stages} g{shape.group}"


# Timing


class Watch(Timer):
    """A timer whose graphs take about two milliseconds."""

    def microseconds(self, call: Callable[[torch.Tensor], object], weights: torch.Tensor) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            for number in range(2):
                start.record()
                call(weights[number % len(weights)])
                end.record()
            end.synchronize()
        except Exception:
            return float("nan")  # more shared memory than there is, or sizes that the library refuses
        turns = int(max(2, 2.0 / max(start.elapsed_time(end), 0.01)) / len(weights)) + 1
        graph = self.capture(partial(call_all, call, weights, turns))
        graph.replay()
        best = float("inf")
        for _ in range(3):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1000 / (turns * len(weights)))
        return best


def products(watch: Watch) -> None:
    print("\nproducts, us; TFLOP/s of the rule (and TB/s of weights); the best of all ways and shapes", flush=True)
    sums: dict[int, dict[str, float]] = {rows: {} for rows in ROWS}
    for columns, inner in SIZES:
        copies = max(2, min(8, (256 << 20) // (columns * inner)))
        dense = torch.empty(copies, columns, inner, dtype=BF16, device="cuda").normal_(0, inner**-0.5)
        cases = {kind: Case(kind, 1, columns, inner, copies) for kind in KINDS}
        for rows in ROWS:
            flops = 2 * rows * columns * inner
            x = torch.randn(rows, inner, device="cuda", dtype=BF16)
            plain = watch.microseconds(partial(F.linear, x), dense if rows < 4096 else dense[:2])
            line = f"{columns:>6} x {inner:<5} {rows:>5} | bf16 {plain:7.1f} ({flops / plain / 1e6:5.0f})"
            sums[rows]["bf16"] = sums[rows].get("bf16", 0) + plain
            for kind, case in cases.items():
                case.resize(rows)
                weights = case.weights if rows < 4096 else case.weights[:2]
                rule = watch.microseconds(case.rule, weights)
                ways = {"rule": rule, "library": watch.microseconds(case.library, weights)}
                if rows <= 256:
                    ways["small"] = watch.microseconds(case.small, weights)
                if rows > 16:
                    for shape in case.shapes():
                        ways[compact(shape)] = watch.microseconds(partial(case.hopper, shape=shape), weights)
                ways["rule"] = rule = min(rule, watch.microseconds(case.rule, weights))  # as warm as the others
                ways = {name: us for name, us in ways.items() if us == us}
                best = min(ways, key=lambda name: ways[name])
                ruled = compact(choose_hopper_shape(rows, columns, inner, case.counters.numel(), x.device))
                speed = f"{flops / rule / 1e6:5.0f}, {columns * inner / rule / 1e6:4.2f}"
                line += f" | {kind} {rule:7.1f} ({speed}) lib {ways.get('library', float('nan')):7.1f}"
                shapes = sorted((us, name) for name, us in ways.items() if "/" in name)[:2]
                line += f" best {ways[best]:7.1f} {best if best != ruled else 'as ruled'}"
                line += "".join(f"; {us:.1f} {name}" for us, name in shapes if name != best)
                for name, us in (("", rule), (" best", ways[best])):
                    sums[rows][kind + name] = sums[rows].get(kind + name, 0) + us
            print(line, flush=True)
        del cases, dense
    print("\nsum of the four products, us, and how many times the speed of bf16", flush=True)
    for rows, each in sums.items():
        rest = "  ".join(f"{name} {us:8.1f} {each['bf16'] / us:4.2f}x" for name, us in each.items() if name != "bf16")
        print(f"{rows:>6} rows  bf16 {each['bf16']:8.1f}  {rest}", flush=True)


def layers(watch: Watch, stacks: dict[str, list[list[Linear]]]) -> None:
    print("\none layer without attention, us, and how many times the speed of bf16", flush=True)
    numbers = torch.arange(2)[:, None]
    for rows in ROWS:
        times = {name: watch.microseconds(Layers(rows, stacks[name], True), numbers) for name in stacks}
        rest = "  ".join(f"{name} {us:8.1f} {times['bf16'] / us:4.2f}x" for name, us in times.items())
        floors = "  ".join(
            f"{name} {max(2 * rows * size / speed / 1e6, size * (2 if name == 'bf16' else 1) / 4.25e6):.1f}"
            for name, speed in FLOORS.items()
            for size in [sum(columns * inner for columns, inner in SIZES)]
        )
        print(f"{rows:>6} rows  {rest}  (floors of the products: {floors})", flush=True)


class Partly(Layers):
    """Layers in which some kernels between the products are left out: what they would make is there already."""

    def __init__(self, rows: int, stacks: list[list[Linear]], left_out: tuple[str, ...] = ()) -> None:
        super().__init__(rows, stacks, True)
        self.ready = []
        for layer, (_, inner) in zip(stacks[0], SIZES):
            x = torch.randn(rows, inner, device="cuda", dtype=BF16)
            self.ready.append(layer.matmul(BF16).quantize(x, layer.storage))
        self.norms, self.output, self.activation = (piece not in left_out for piece in PIECES)

    def __call__(self, number: torch.Tensor) -> None:
        qkv, o, gate_up, down = self.stacks[int(number)]
        wide = qkv(self.normed(qkv) if self.norms else self.ready[0])
        self.update = o(wide[:, :4096] if self.output else self.ready[1])
        wide = gate_up(self.normed(gate_up) if self.norms else self.ready[2])
        self.update = down(act_mul_for(down, self.ops, wide, "silu") if self.activation else self.ready[3])


def pieces(watch: Watch, stacks: dict[str, list[list[Linear]]]) -> None:
    print("\nwhat a layer consists of, us: all; its products alone, in this order; what all takes more than without a")
    print("kernel; all with so many warps for rows of 4096 and of 14336; all with other ways to launch", flush=True)
    numbers = torch.arange(2)[:, None]
    for rows in PIECES_ROWS:
        for name in ("fp8", "w8a8"):
            given = stacks[name]
            whole, bare = (watch.microseconds(Partly(rows, given, out), numbers) for out in ((), PIECES))
            line = f"{rows:>5} {name:4} all {whole:6.1f} products {bare:6.1f} |"
            for piece in PIECES:
                line += f" {piece} {whole - watch.microseconds(Partly(rows, given, (piece,)), numbers):4.1f}"
            for block, counts in WARPS.items():
                line += f" | {block}:"
                for count in counts:
                    with warps_of(block, count):
                        line += f" {count}w {watch.microseconds(Partly(rows, given), numbers):5.1f}"
            line += " | "
            for what, kernels in {"products": (hopper._kernel,), "quantizers": QUANTIZERS}.items():
                with without_pdl(*kernels):
                    line += f" {what} without PDL {watch.microseconds(Partly(rows, given), numbers):5.1f}"
            with without_pdl(hopper._kernel, *QUANTIZERS):
                line += f" none with {watch.microseconds(Partly(rows, given), numbers):5.1f}"
            if name == "fp8":
                kernels = matmul.KERNELS
                matmul.KERNELS = tuple(one for one in kernels if one.name != "float8 in the matrix library")
                select_matmul.cache_clear()
                ours = [stack(Fp8()) for _ in given]
                line += f" no library {watch.microseconds(Partly(rows, ours), numbers):5.1f}"
                matmul.KERNELS = kernels
                select_matmul.cache_clear()
            print(line, flush=True)


def stack(scheme: QuantScheme) -> list[Linear]:
    made = []
    for columns, inner in SIZES:
        storage = scheme.allocate(columns, inner, BF16, torch.device("cuda", 0))
        scheme.write(storage, 0, torch.randn(columns, inner, device="cuda", dtype=BF16) * inner**-0.5)
        made.append(Linear(scheme, storage))
    return made


if __name__ == "__main__":
    sys.exit(main())
