"""Timing of one operation, and the two ceilings of a machine: bytes per second and operations per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from tokenmill.quant.schemes.scheme import Linear, QuantScheme

Work = Callable[[], object]


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches at best, measured: the faster of a large copy and a large sum, and a large product.

    Operations count as multiplications and additions of weights, in whatever numbers they are done.
    """

    bytes_per_s: float
    flops_per_s: float

    def or_better(self, other: Ceilings) -> Ceilings:
        return Ceilings(max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s))


def seconds(variants: list[Work], device: torch.device, budget: float = 0.3, *, best: bool = False) -> float:
    """Seconds of one call, median or best. `variants` do the same on different memory, so that no cache is of use."""
    for work in variants:
        work()
    times = _on_gpu(variants, budget) if device.type == "cuda" else _on_cpu(variants, budget)
    return min(times) if best else statistics.median(times)


def ceilings(device: torch.device, dtype: torch.dtype, schemes: Iterable[QuantScheme] = ()) -> Ceilings:
    """`schemes` are other ways to multiply, the fastest of which is the ceiling of products."""
    return ceilings_of(device, dtype, schemes)(0.3)


def ceilings_of(
    device: torch.device, dtype: torch.dtype, schemes: Iterable[QuantScheme] = ()
) -> Callable[[float], Ceilings]:
    """What measures the ceilings, as often as it is called, with so many seconds for each part.

    Its memory is taken for each call: between two of them, other work needs the room.
    """
    ways = tuple(schemes)

    def measure(budget: float) -> Ceilings:
        return Ceilings(_memory_speed(device, budget), _product_speed(device, dtype, ways, budget))

    return measure


def _memory_speed(device: torch.device, budget: float) -> float:  # bytes per second
    big = device.type == "cuda"
    # Several times the largest caches: of 64 MiB, one of 32 kept enough to double the speed of a read now and then.
    source = torch.ones((1 << 28) if big else (1 << 26), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # A CPU is often not alone: the best of many is what it can. A GPU at its best has not warmed up yet.
    # A copy by a kernel: in a recording, `copy_` becomes a transfer by the copy engine, which is slower.
    copy = seconds([lambda: torch.neg(source, out=target)], device, budget, best=not big)
    read = seconds([lambda: source.sum()], device, budget, best=not big)
    return max(2 * source.nbytes / copy, source.nbytes / read)


def _product_speed(
    device: torch.device, dtype: torch.dtype, schemes: Iterable[QuantScheme], budget: float
) -> float:  # operations per second
    big = device.type == "cuda"
    size = 8192 if big else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    products: list[Work] = [lambda: a @ b]
    for scheme in schemes:
        storage = scheme.allocate(size, size, dtype, device)
        scheme.write(storage, 0, b)
        products.append(partial(Linear(scheme, storage), a))
    return 2 * size**3 / min(seconds([one], device, budget, best=not big) for one in products)


def _on_cpu(variants: list[Work], budget: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        variants[len(times) % len(variants)]()
        times.append(time.perf_counter() - start)
    return times


def _on_gpu(variants: list[Work], budget: float) -> list[float]:
    """Replays of one recording of all variants, so that launches from Python do not count."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in variants:
            work()
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / len(variants))
    return times
