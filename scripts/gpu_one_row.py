"""On a CUDA machine: check and time products of one row with int4 weights (ops/triton/gemm/one_row.py).

    python scripts/gpu_one_row.py            # check, sweep launch shapes, time the products of a layer as a chain

Each time is one launch inside a CUDA graph that walks over several copies of the weight, so that the cache holds none.
A chain is what a layer multiplies: norm and qkv, o, norm and gate_up and activation, down; without RoPE and attention.
"""

from __future__ import annotations

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

from gpu_gemm import Timer
from gpu_weight_only import BF16, CUDA, LLAMA, Case, rate

from tokenmill.ops.triton.activation import act_mul
from tokenmill.ops.triton.gemm.one_row import OneShape, one_row_gemm
from tokenmill.ops.triton.norm import add_rms_norm
from tokenmill.ops.types import Unnormed
from tokenmill.quant.forms import WeightForm

SHAPES = [
    OneShape(*shape)
    for shape in [
        (3, 4, 8, 3), (3, 4, 8, 2), (4, 4, 8, 2), (2, 4, 8, 3), (2, 4, 8, 4), (2, 4, 16, 2), (3, 4, 4, 6), (4, 4, 4, 4),
        (5, 4, 4, 3), (2, 4, 4, 8), (2, 8, 4, 4),
    ]
]  # fmt: skip
HEAD = (128256, 4096)
FORMS = [WeightForm("int4", 128), WeightForm("int4", 64)]
Task = tuple[str, WeightForm, int, int, OneShape | None, torch.dtype]


def prepare() -> list[str]:
    tasks: list[Task] = [
        (what, form, columns, inner, None, dtype)
        for what in ("plain", "norm", "silu", "gelu_tanh", "bias")
        for form in FORMS
        for dtype in (BF16, torch.float16)
        for columns, inner in ((4096, 4096), (1024, 14336), (96, 2048), (224, 3072))
    ]
    tasks += [
        (what, FORMS[0], *size, shape, BF16)
        for size in LLAMA[1:]
        for shape in SHAPES
        for what in kinds(size)
        if divides(shape, size[1])
    ]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        return [failure for failure in pool.map(try_one, tasks, chunksize=4) if failure]


def kinds(size: tuple[int, int]) -> list[str]:
    return ["plain", "norm", "silu"] if size[1] == 4096 else ["plain"]


def divides(shape: OneShape, inner: int) -> bool:
    """Whether stages of this shape fill a band."""
    return inner // 64 % (shape.num_warps * shape.tiles) == 0


def try_one(task: Task) -> str:
    what, form, columns, inner, shape, dtype = task
    try:
        complaint = check(what, Case(form, 1, columns, inner, copies=1), shape, dtype)
    except Exception as error:
        complaint = f"{type(error).__name__}: {str(error)[:150]}"
    return f"FAILED {what} {form.name} {columns} x {inner} {shape} {dtype}: {complaint}" if complaint else ""


def check(what: str, case: Case, shape: OneShape | None, dtype: torch.dtype) -> str:
    x, codes = case.x.to(dtype), case.codes[0]
    weight = case.plain(torch.float64)
    bias = torch.randn(case.columns, device=CUDA).to(dtype) if what == "bias" else None
    act = what if what in ("silu", "gelu_tanh") else ""
    rows: torch.Tensor | Unnormed = x
    exact = x
    if what not in ("plain", "bias"):
        residual, gain = torch.randn_like(x), torch.rand(case.inner, device=CUDA).to(dtype)
        rows = Unnormed(x, residual, gain, 1e-5, torch.empty_like(x))
        exact = F.rms_norm((residual + x).double(), (case.inner,), gain.double(), 1e-5)
    wide = exact.double() @ weight.T + (0 if bias is None else bias.double())
    if act:
        gate, up = wide.chunk(2, -1)
        wide = (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up
    got = one_row_gemm(rows, codes, bias, act, shape)
    error = ((got.double() - wide).norm() / wide.norm()).item()
    if not error < (0.006 if dtype == BF16 else 0.001):
        return f"error {error:.5f}"
    if isinstance(rows, Unnormed) and not torch.equal(rows.total, rows.residual + rows.update):
        return "another residual"
    if not all(torch.equal(one_row_gemm(rows, codes, bias, act, shape), got) for _ in range(3)):
        return "another result in another run"
    return ""


def sweep(timer: Timer) -> None:
    print("\nus (TB/s, part of 4.25): the old kernel; the rule; launch shapes from the best on", flush=True)
    for columns, inner in [*LLAMA, HEAD]:
        case = Case(FORMS[0], 1, columns, inner)
        x = case.x
        old = timer.microseconds(case.ours, case.numbers)
        rule = timer.microseconds(lambda number, case=case, x=x: one_row_gemm(x, case.codes[int(number)]), case.numbers)
        tried = sorted(
            (timer.microseconds(partial(plain, case, shape), case.numbers), name(shape))
            for shape in SHAPES
            if divides(shape, inner)
        )
        ranked = ", ".join(f"{shape} {us:.1f}" for us, shape in tried)
        print(
            f"{columns:>7} x {inner:<5} {old:6.1f} {rate(case, old)}  {rule:6.1f} {rate(case, rule)}  {ranked}",
            flush=True,
        )
        del case


def plain(case: Case, shape: OneShape, number: torch.Tensor) -> torch.Tensor:
    return one_row_gemm(case.x, case.codes[int(number)], shape=shape)


def name(shape: OneShape) -> str:
    return f"{shape.programs}p{shape.num_warps}w{shape.tiles}t{shape.stages}"


class Chain:
    """The products of layers, each on its own weights."""

    def __init__(self, copies: int) -> None:
        self.cases = [[Case(FORMS[0], 1, *size, copies=1) for size in LLAMA] for _ in range(copies)]
        self.x = torch.randn(1, 4096, device=CUDA, dtype=BF16)
        self.residual = torch.randn(1, 4096, device=CUDA, dtype=BF16)
        self.gain = torch.rand(4096, device=CUDA).to(BF16)

    def fused(self, number: torch.Tensor, shapes: tuple[OneShape | None, ...] = (None,) * 4) -> torch.Tensor:
        qkv, o, gate_up, down = (case.codes[0] for case in self.cases[int(number)])
        total = torch.empty_like(self.residual)
        made = one_row_gemm(Unnormed(self.x, self.residual, self.gain, 1e-5, total), qkv, shape=shapes[0])
        made = one_row_gemm(made[:, :4096], o, shape=shapes[1])
        after = torch.empty_like(total)
        made = one_row_gemm(Unnormed(made, total, self.gain, 1e-5, after), gate_up, act="silu", shape=shapes[2])
        return one_row_gemm(made, down, shape=shapes[3])

    def apart(self, number: torch.Tensor, old: bool) -> torch.Tensor:
        qkv, o, gate_up, down = (partial(self.product, case, old) for case in self.cases[int(number)])
        x, residual = add_rms_norm(self.x.clone(), self.residual, self.gain, 1e-5)
        x, residual = add_rms_norm(o(qkv(x)[:, :4096]), residual, self.gain, 1e-5)
        return down(act_mul(gate_up(x), "silu"))

    @staticmethod
    def product(case: Case, old: bool, x: torch.Tensor) -> torch.Tensor:
        if old:
            case.x = x
            return case.ours(case.numbers[0])
        return one_row_gemm(x, case.codes[0])


def chains(timer: Timer) -> None:
    chain, numbers = Chain(6), torch.arange(6)[:, None]
    print("\na layer's products in a chain, us (bytes alone: 27.3):", flush=True)
    print(f"  old kernels, apart   {timer.microseconds(partial(chain.apart, old=True), numbers):6.1f}")
    print(f"  these, apart         {timer.microseconds(partial(chain.apart, old=False), numbers):6.1f}")
    print(f"  these, fused, rule   {timer.microseconds(chain.fused, numbers):6.1f}", flush=True)
    for shape in SHAPES:
        if divides(shape, 14336):
            us = timer.microseconds(partial(chain.fused, shapes=(shape,) * 4), numbers)
            print(f"  these, fused, {name(shape):10s} {us:6.1f}", flush=True)


def main() -> int:
    begun = time.perf_counter()
    failures = prepare()
    print("\n".join(failures[:30]), f"{len(failures)} checks FAILED" if failures else "checks passed")
    print(f"({time.perf_counter() - begun:.0f} s)", flush=True)
    gc.disable()  # a collection would wait inside a capture
    timer = Timer()
    chains(timer)
    sweep(timer)
    print(f"({time.perf_counter() - begun:.0f} s)")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
