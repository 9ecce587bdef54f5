"""The product of a linear layer: which kernels exist, what each declares it can do, and which serves how many rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from tokenmill.errors import ConfigError
from tokenmill.ops.device_facts import Requirement, misfit
from tokenmill.ops.types import QuantizedRows, Storage, Unnormed

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NO_LIMIT = 1 << 62
ANY_ROWS = (0, NO_LIMIT)
Span = tuple[int, int]  # numbers of rows, both ends included

Quantize = Callable[[torch.Tensor, torch.dtype, torch.Tensor | None], QuantizedRows]  # x, dtype of codes, fixed scale
RunGated = Callable[[torch.Tensor, Storage, str], torch.Tensor]
RunFused = Callable[[torch.Tensor | Unnormed, Storage, torch.Tensor | None, str], torch.Tensor]


@dataclass(frozen=True)
class MatmulNeed:
    """What a linear layer asks of its product: how its weight is stored, and where which inputs are multiplied."""

    weight: str  # dense, int4, int8, grouped fp8, fp8, w8a8, packed: what `Storage` holds is up to it
    out_features: int
    in_features: int
    dtype: torch.dtype  # of the inputs, and of the result
    device: torch.device
    group: int = 0  # inputs that share a scale; 0: all of a row
    zeros: bool = False
    tiled: bool = False  # small codes lie in tiles (ops/weight_words.py)
    weight_dtype: torch.dtype | None = None  # of a dense weight; None: as the inputs
    static_inputs: bool = False  # inputs are rounded with a scale of the checkpoint
    batch_invariant: bool = False
    out_dtype: torch.dtype | None = None  # None: as the inputs

    @property
    def name(self) -> str:
        """How the weight is stored, in a few words."""
        group = f"-g{self.group}" if self.group else ""
        zeros = "-zeros" if self.zeros else ""
        order = "" if self.tiled or self.weight not in ("int4", "int8", "grouped fp8") else ", in plain order"
        static = ", static inputs" if self.static_inputs else ""
        return f"{self.weight}{group}{zeros}{order}{static}"


def dense_need(
    weight: torch.Tensor,  # [out, in]
    dtype: torch.dtype,  # of the inputs
    *,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> MatmulNeed:
    """Of a weight that is stored as it is."""
    rows, columns = weight.shape
    return MatmulNeed(
        "dense", rows, columns, dtype, weight.device,
        weight_dtype=weight.dtype, batch_invariant=batch_invariant, out_dtype=out_dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class MatmulKernel:
    """One way to multiply rows with a stored weight, with what it declares it can do."""

    name: str
    weights: tuple[str, ...]
    # Of the need, x [rows, in] (QuantizedRows where `inputs` says so), the storage and the bias: [rows, out].
    run: Callable[..., torch.Tensor]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS
    requires: Requirement | None = None  # of the GPU and of Triton
    shape_misfit: Callable[[MatmulNeed], str] = lambda need: ""  # why it cannot have this weight; empty where it can
    rows: Span = ANY_ROWS  # that it can multiply
    fastest: Callable[[MatmulNeed], Sequence[Span]] = lambda need: ()  # rows for which it was measured to be
    inputs: torch.dtype | None = None  # codes that inputs are rounded to; None: they are multiplied as they are
    quantize: Quantize | None = None  # makes such inputs
    # As `run`, for one row: with the norm before it (x is Unnormed), and the activation behind it, named by the last.
    fused: Callable[[MatmulNeed, Any, Storage, torch.Tensor | None, str], torch.Tensor] | None = None
    gates: Callable[[MatmulNeed], bool] = lambda need: False  # whether `fused` can take in the activation
    counters: Callable[[int], int] = lambda out_features: 0  # split-K counters that a weight needs beside it
    # Only for the product of gate and up: `run` takes the name of an activation as well, and gates: [rows, out / 2].
    gated: bool = False
    recordable: tuple[str, ...] = ("cuda",)  # devices on which a step with it may be recorded
    # A row's bits depend on its own inputs alone: not on other rows, nor on their number.
    batch_invariant: bool = False
    rank: int = 0  # where several are the fastest, or none is: the highest rank


# The most rows, the bound kernel, and how its inputs are rounded: what a call needs to know.
_Serving = tuple[int, Callable[[Any, Storage, torch.Tensor | None], torch.Tensor], torch.dtype | None, Quantize | None]


class Matmul:
    """What multiplies one kind of linear layer: kernels by number of rows. Callable as run(x, storage, bias)."""

    def __init__(
        self, need: MatmulNeed, serving: Sequence[tuple[int, MatmulKernel]], gating: Sequence[MatmulKernel] = ()
    ) -> None:
        """serving: the most rows that each kernel serves, in ascending order; the last has no limit. gating: kernels
        with an activation, the best first.
        """
        self.need = need
        self.serving = tuple(serving)
        self.passed_over: tuple[str, ...] = ()
        self.gating_passed_over: tuple[str, ...] = ()  # of the product of gate and up
        self._gating = [(span, one.name, partial(one.run, need)) for one in gating for span in one.fastest(need)]
        self.recordable = all(need.device.type in kernel.recordable for _, kernel in serving)
        self._by_rows: list[_Serving] = [
            (most, partial(one.run, need), one.inputs, one.quantize) for most, one in serving
        ]
        alone = self.kernel(1)
        self.fused: RunFused | None = None if alone.fused is None else partial(alone.fused, need)
        self.gates = self.fused is not None and alone.gates(need)

    def __call__(
        self,
        x: torch.Tensor | QuantizedRows,  # [..., in]
        storage: Storage,
        bias: torch.Tensor | None,  # [out]
    ) -> torch.Tensor:  # [..., out]
        shape = x.shape
        if len(shape) != 2:
            out = self(x.flatten(0, -2), storage, bias)
            return out.view(*shape[:-1], out.shape[-1])
        _, run, codes, quantize = self._serving(shape[0])
        if isinstance(x, QuantizedRows):
            x = x if codes is not None else x.widen()
        elif codes is not None:
            assert quantize is not None
            x = quantize(x, codes, storage.get("input_scale"))
        return run(x, storage, bias)

    def _serving(self, rows: int) -> _Serving:
        for one in self._by_rows:
            if rows <= one[0]:
                return one
        raise AssertionError("the last kernel has no limit")

    def gated(self, rows: int) -> RunGated | None:
        """A product of so many rows with the activation behind it, where that is faster than one after the other."""
        return next((run for (first, last), _, run in self._gating if first <= rows <= last), None)

    def kernel(self, rows: int) -> MatmulKernel:
        return next(kernel for most, kernel in self.serving if rows <= most)

    def inputs(self, rows: int) -> torch.dtype | None:
        """The codes that so many rows are rounded to: whoever makes them may hand them over so; None: as they are."""
        return self._serving(rows)[2]

    def quantize(self, x: torch.Tensor, storage: Storage) -> QuantizedRows:  # [rows, in]
        """An input as `inputs` says."""
        _, _, codes, quantize = self._serving(x.shape[0])
        assert codes is not None and quantize is not None
        return quantize(x, codes, storage.get("input_scale"))

    def describe(self) -> str:
        """Which kernel serves how many rows."""
        firsts = [0, *(most + 1 for most, _ in self.serving)]
        parts = [(kernel.name, _rows((first, most))) for first, (most, kernel) in zip(firsts, self.serving) if most]
        return parts[0][0] if len(parts) == 1 else ", ".join(f"{name} ({rows})" for name, rows in parts)

    def describe_gated(self) -> str:
        """Which kernel takes in the activation, and of how many rows; empty where none does."""
        return ", ".join(f"{name} ({_rows(span)})" for span, name, _ in self._gating)


def only(kernel: MatmulKernel, need: MatmulNeed) -> Matmul:
    """A product by one kernel, whatever the rows."""
    return Matmul(need, [(NO_LIMIT, kernel)])


@lru_cache(maxsize=1024)
def select_matmul(need: MatmulNeed) -> Matmul:
    """The kernels of a linear layer. Of those that fit, the ones that are the fastest for a number of rows serve it."""
    fitting, refused, gating = [], [], []
    for kernel in matmul_kernels(need.device.type):
        if need.weight in kernel.weights:
            reason = _misfit(kernel, need)
            if reason:
                refused.append((kernel, reason))
            elif kernel.gated:
                gating.append(kernel)
            else:
                fitting.append((kernel, tuple(kernel.fastest(need))))
    serving: list[tuple[int, MatmulKernel]] = []
    bounds = {last for kernel, spans in fitting for _, last in (*spans, kernel.rows)}
    bounds |= {first - 1 for kernel, spans in fitting for first, _ in (*spans, kernel.rows) if first}
    for most in sorted(bounds):
        can = [(kernel, spans) for kernel, spans in fitting if kernel.rows[0] <= most <= kernel.rows[1]]
        if not can:
            break
        best = max(can, key=lambda one: (any(first <= most <= last for first, last in one[1]), one[0].rank))[0]
        if serving and serving[-1][1] is best:
            serving.pop()
        serving.append((most, best))
    if not serving or serving[-1][0] != NO_LIMIT:
        told = [one for one in refused if one[0].batch_invariant or not need.batch_invariant]
        reasons = ", ".join(f"{kernel.name}: {reason}" for kernel, reason in told)
        what = f"{need.name} weight of {need.out_features} x {need.in_features}"
        if need.batch_invariant:
            raise ConfigError(
                f"batch_invariant is set, but nothing multiplies a {what} so ({reasons}); leave batch_invariant out"
            )
        raise ConfigError(f"nothing multiplies a {what} here ({reasons}); take another quantization or dtype")
    chosen = Matmul(need, serving, sorted(gating, key=lambda kernel: -kernel.rank))
    chosen.passed_over = _passed_over(chosen, [one for one in refused if not one[0].gated])
    instead = "instead the activation follows the product"
    chosen.gating_passed_over = tuple(f"{one.name}: {reason}; {instead}" for one, reason in refused if one.gated)
    return chosen


def _passed_over(chosen: Matmul, refused: Iterable[tuple[MatmulKernel, str]]) -> tuple[str, ...]:
    """What would be better for some rows, why it is not used, and what serves them instead."""
    told = []
    for kernel, reason in refused:
        instead = chosen.kernel(max(kernel.rows[0], 1))
        if kernel.rank > instead.rank:
            told.append(f"{kernel.name}: {reason}; instead for {_rows(kernel.rows)}: {instead.name}")
    return tuple(told)


def counters_of(need: MatmulNeed) -> int:
    """How many split-K counters, all zero, a weight needs beside it, whichever kernels serve it."""
    kernels = [one for one in matmul_kernels(need.device.type) if need.weight in one.weights and not _misfit(one, need)]
    return max((kernel.counters(need.out_features) for kernel in kernels), default=0)


def matmul_kernels(device: str) -> Iterable[MatmulKernel]:
    """Every kernel that can be imported for this device."""
    modules = ["tokenmill.ops.matmul_torch"]
    if device == "cpu":
        modules.append("tokenmill.ops.native.matmul")
    elif importlib.util.find_spec("triton") is not None:
        modules.append("tokenmill.ops.triton.gemm.matmul")
    for module in modules:
        yield from importlib.import_module(module).KERNELS


def _misfit(kernel: MatmulKernel, need: MatmulNeed) -> str:
    if need.device.type not in kernel.devices:
        return f"runs on {'/'.join(kernel.devices)}, not {need.device.type}"
    if need.batch_invariant and not kernel.batch_invariant:
        return "not batch-invariant"
    if need.dtype not in kernel.dtypes:
        return f"no {str(need.dtype).removeprefix('torch.')}"
    reason = "" if kernel.requires is None else misfit(kernel.requires, need.device)
    return reason or kernel.shape_misfit(need)


def _rows(span: Span) -> str:
    first, last = max(span[0], 1), span[1]
    if last == NO_LIMIT:
        return "any number of rows" if first == 1 else f"{first} rows and more"
    if first == last:
        return "1 row" if first == 1 else f"{first} rows"
    return f"up to {last} rows" if first == 1 else f"{first} to {last} rows"
