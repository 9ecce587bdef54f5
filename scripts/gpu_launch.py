"""On a CUDA machine: check and time launches that overlap on the device, and what a launch costs the host.

    python scripts/gpu_launch.py                # all of it, under a minute
    python scripts/gpu_launch.py --only check   # or bench, shapes, host

A chain is the decode step of qwen3-0.6b without its attention: norm, products, rotation and KV write, activation, layer
after layer with weights of their own, then the vocabulary and the sampled token, in a CUDA graph.
check: graphs with and without overlap give the same bits, 200 times with new inputs and a busy memory beside them.
bench: time of a layer with and without overlap, and at the speed of memory. shapes: the same for other shapes of the
products of one row. host: Python's microseconds per launch, through Triton and through the cheap launcher.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenmill.ops.device_facts import HOPPER_ATTENTION, usable
from tokenmill.ops.triton import activation, launch, norm, rope
from tokenmill.ops.triton.attention import fresh as attention_fresh
from tokenmill.ops.triton.attention.paged import attention
from tokenmill.ops.triton.gemm import quantize, small
from tokenmill.ops.triton.gemm.small import GemvShape, choose_shape, counters_for, small_gemm
from tokenmill.ops.triton.sample import sampler as sample
from tokenmill.ops.types import AttentionBatch, Mask, SampleBatch

BF16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
TB_PER_S = 4.25  # measured on an H200
RUNS = 200
GEMV_SHAPES = [(4, 1024, 4), (2, 1024, 4), (4, 512, 2), (8, 512, 4), (2, 512, 2), (8, 256, 1)]


@dataclass(frozen=True)
class Size:
    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    inner: int = 3072
    vocab: int = 151936

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:  # columns, inner
        q = self.heads * self.dim
        return {
            "qkv": (q + 2 * self.kv_heads * self.dim, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def layer_bytes(self) -> int:  # in bfloat16
        return sum(2 * columns * inner for columns, inner in self.matrices.values())


class Model:
    """Random weights; float8 ones have a scale per row, and so have their inputs."""

    def __init__(self, size: Size, float8: bool, device: str) -> None:
        self.size, self.float8 = size, float8
        self.layers = [
            {name: self._matrix(*shape, device) for name, shape in size.matrices.items()} for _ in range(size.layers)
        ]
        self.lm_head = torch.randn(size.vocab, size.hidden, device=device, dtype=BF16)
        self.gains = torch.rand(size.layers, 2, size.hidden, device=device, dtype=BF16) + 0.5
        self.head_gain = torch.rand(size.dim, device=device, dtype=BF16) + 0.5
        self.table = torch.rand(4096, size.dim, device=device) * 2 - 1
        self.counters = torch.zeros(counters_for(size.vocab), dtype=torch.int32, device=device)

    def _matrix(self, columns: int, inner: int, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = torch.empty(columns, inner, device=device, dtype=BF16).normal_(0, inner**-0.5)
        if not self.float8:
            return weight, None
        return (weight * 64).to(FLOAT8), torch.full((columns,), 1 / 64, device=device)


@dataclass
class State:
    """What a step reads and writes besides the weights; `shapes` overrides those of products of one row."""

    model: Model
    rows: int
    device: str
    shapes: dict[str, GemvShape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, device = self.model.size, self.device
        self.x = torch.zeros(self.rows, size.hidden, dtype=BF16, device=device)
        self.residual_in = torch.zeros_like(self.x)
        self.positions = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.positions)
        cache = (size.layers, 8, 16, size.kv_heads, size.dim)
        self.k_cache, self.v_cache = (torch.zeros(cache, dtype=BF16, device=device) for _ in range(2))
        self.sampling = SampleBatch(
            temperature=torch.full((self.rows,), 0.7, device=device),
            top_k=torch.full((self.rows,), -1, device=device),
            top_p=torch.ones(self.rows, device=device),
            min_p=torch.zeros(self.rows, device=device),
            seed=torch.arange(self.rows, device=device),
            position=self.positions,
            all_greedy=False,
            any_filter=False,
        )
        self.residual = self.tokens = self.x

    def set(self, seed: int) -> None:
        """New inputs; the copies are ordered before what is launched next."""
        made = torch.Generator(self.device).manual_seed(seed)
        self.x.normal_(generator=made)
        self.residual_in.normal_(generator=made)
        self.positions.fill_(seed % 4096)
        self.slots.copy_(torch.arange(self.rows, device=self.device).add_(seed).remainder_(128))

    def results(self) -> list[torch.Tensor]:
        return [self.residual, self.k_cache, self.v_cache, self.tokens]

    def step(self) -> None:
        size, model = self.model.size, self.model
        x, residual = self.x.clone(), self.residual_in.clone()
        for index, layer in enumerate(model.layers):
            first, second = model.gains[index]
            qkv = self._product("qkv", layer, self._normed(x, residual, first))
            q, k, v = qkv.view(self.rows, -1, size.dim).split([size.heads, size.kv_heads, size.kv_heads], 1)
            rope.rope_kv_write(
                q, k, v, model.table, self.positions, self.k_cache[index], self.v_cache[index], self.slots,
                model.head_gain, model.head_gain, 1e-6,
            )  # fmt: skip
            x = self._product("o", layer, self._whole(q.flatten(1)))
            x = self._product("gate_up", layer, self._normed(x, residual, second))
            x = self._product("down", layer, self._activated(x))
        x, residual = norm.add_rms_norm(x, residual, model.gains[0, 0], 1e-6)
        logits = small_gemm(x, model.lm_head, counters=model.counters)
        self.residual, self.tokens = residual, sample.sample(logits, self.sampling)

    def _normed(self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.model.float8:
            return (norm.add_rms_norm(x, residual, gain, 1e-6)[0],)
        return quantize.add_rms_norm_quantized(x, residual, gain, 1e-6)[:2]

    def _activated(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quantize.act_mul_quantized(x, "silu") if self.model.float8 else (activation.act_mul(x, "silu"),)

    def _whole(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quantize.quantize_rows(x) if self.model.float8 else (x,)

    def _product(self, name: str, layer: dict[str, Any], x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        weight, scale = layer[name]
        x_scale = x[1] if len(x) > 1 else None
        return small_gemm(
            x[0], weight, scale=scale, x_scale=x_scale, counters=self.model.counters, dtype=BF16,
            shape=self.shapes.get(name),
        )  # fmt: skip


@contextmanager
def overlap(on: bool) -> Iterator[None]:
    """Kernels that are launched or recorded inside take part in overlap, or do not."""
    before = launch.pdl_supported
    if not on:
        launch.pdl_supported = lambda device: False  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.pdl_supported = before


def recorded(state: State, on: bool) -> torch.cuda.CUDAGraph:
    with overlap(on):
        state.set(0)
        state.step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state.step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, replays: int = 30) -> float:
    best = float("inf")
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / replays)
    return best


def check() -> list[str]:
    lines = []
    side = torch.cuda.Stream()
    hog = torch.empty(2, 256 << 20, dtype=torch.uint8, device="cuda")
    for float8 in (False, True):
        model = Model(Size(layers=12), float8, "cuda")
        for rows in (1, 8):
            states = [State(model, rows, "cuda") for _ in range(2)]
            graphs = [recorded(state, on) for state, on in zip(states, (False, True), strict=True)]
            differ = torch.zeros((), dtype=torch.int64, device="cuda")
            distinct = set()
            for run in range(RUNS):
                if run % 3 == 0:  # somebody else's traffic moves the kernels against each other
                    with torch.cuda.stream(side):
                        hog[run % 2].copy_(hog[1 - run % 2])
                for state, graph in zip(states, graphs, strict=True):
                    state.set(run)
                    graph.replay()
                for one, other in zip(states[0].results(), states[1].results(), strict=True):
                    differ += (one != other).any()
                if run % 20 == 0:
                    distinct.add(states[1].residual.double().sum().item())
            assert len(distinct) > 1, "the inputs change nothing: this check checks nothing"
            failed = int(differ.item())
            lines.append(
                f"{'fp8' if float8 else 'bf16'} {rows:3d} rows: {failed} differences in {RUNS} runs"
                f"{'' if failed == 0 else '   WRONG'}"
            )
            print(lines[-1], flush=True)
    return lines


def bench() -> list[str]:
    lines = []
    for float8 in (False, True):
        size = Size()
        model = Model(size, float8, "cuda")
        for rows in (1, 8):
            state = State(model, rows, "cuda")
            times = [milliseconds(recorded(state, on)) for on in (False, True)]
            head = 2 * size.vocab * size.hidden
            floor = (size.layer_bytes / (2 if float8 else 1) * size.layers + head) / TB_PER_S / 1e9
            lines.append(
                f"{'fp8' if float8 else 'bf16'} {rows:3d} rows, {size.layers} layers: plain {times[0]:.3f} ms, "
                f"overlapped {times[1]:.3f} ms, at the speed of memory {floor:.3f} ms; a layer gains "
                f"{(times[0] - times[1]) / size.layers * 1e3:.1f} us"
            )
            print(lines[-1], flush=True)
    return lines


def shapes() -> list[str]:
    """One matrix at a time; the others keep the shapes of the rule."""
    size = Size()
    model = Model(size, False, "cuda")
    lines = []
    for name, (columns, inner) in size.matrices.items():
        ruled = choose_shape(1, columns, inner, 2, 2, torch.device("cuda"), may_split=True)
        found: dict[tuple[int, int, int], list[float]] = {}
        for shape in GEMV_SHAPES:
            state = State(model, 1, "cuda", {name: GemvShape(*shape)})
            found[shape] = [milliseconds(recorded(state, on), 20) for on in (False, True)]
        best = min(found, key=lambda shape: found[shape][1])
        table = "  ".join(f"{shape}: {plain:.3f}/{both:.3f}" for shape, (plain, both) in found.items())
        lines.append(
            f"{name} {columns}x{inner}: best overlapped {best}, rule {ruled}\n    ms plain/overlapped  {table}"
        )
        print(lines[-1], flush=True)
    return lines


class Noted:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.call: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def note(*args: Any, **meta: Any) -> None:
            self.call = grid, args, meta
            self.kernel[grid](*args, **meta)

        return note


def burst(work: Callable[[], Any], launches: int = 100) -> float:
    """Microseconds of the host per call; few enough calls for the device's queue to take them all."""
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            work()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / launches * 1e6


def host() -> list[str]:
    size = Size(layers=2)
    state = State(Model(size, False, "cuda"), 1, "cuda")
    eight = State(Model(size, True, "cuda"), 1, "cuda")
    prompt = torch.randn(4096, size.heads, size.dim, device="cuda", dtype=BF16)
    k_cache, v_cache = (torch.randn(256, 16, size.kv_heads, size.dim, device="cuda", dtype=BF16) for _ in range(2))
    batch = AttentionBatch(
        rows=torch.zeros(1, dtype=torch.int32, device="cuda"),
        q_start=torch.tensor([0, 4096], dtype=torch.int32, device="cuda"),
        context=torch.tensor([4096], dtype=torch.int32, device="cuda"),
        block_tables=torch.arange(256, dtype=torch.int32, device="cuda")[None],
        num_singles=0, max_query=4096, max_context=4096, host_rows=[0], host_counts=[4096], host_context=[4096],
    )  # fmt: skip
    wanted: list[tuple[Any, str, Callable[[], Any]]] = [
        (norm, "_add_norm_kernel", state.step),
        (norm, "_norm_kernel", lambda: norm.rms_norm(state.x, state.model.gains[0, 0], 1e-6)),
        (rope, "_rope_kernel", state.step),
        (activation, "_act_mul_kernel", state.step),
        (small, "_gemv_kernel", state.step),
        (sample, "_best_kernel", state.step),
        (sample, "_join_kernel", state.step),
        (quantize, "_quantize_kernel", eight.step),
        (quantize, "_add_norm_kernel", eight.step),
        (quantize, "_act_mul_kernel", eight.step),
        (attention_fresh, "_gather_kernel", lambda: attention(prompt, k_cache, v_cache, batch, Mask(), 0.09)),
    ]
    if usable(HOPPER_ATTENTION, torch.device("cuda", torch.cuda.current_device())):
        wanted.append((attention_fresh._hopper(), "hopper_kernel", wanted[-1][2]))
    lines = [f"{'kernel':40s} {'Triton':>8s} {'cheap':>8s}   us of Python per launch"]
    for module, name, work in wanted:
        kernel = getattr(module, name)
        noted = Noted(kernel)
        setattr(module, name, noted)
        work()
        setattr(module, name, kernel)
        grid, args, meta = noted.call
        kernel[grid](*args, **meta)
        quick = burst(lambda kernel=kernel, grid=grid, args=args, meta=meta: kernel[grid](*args, **meta))
        plain = burst(lambda kernel=kernel, grid=grid, args=args, meta=meta: kernel.kernel[grid](*args, **meta))
        direct = any(made is not None for made in kernel._compiled.values())
        label = f"{module.__name__.rsplit('.', 1)[1]}.{name}"
        lines.append(f"{label:40s} {plain:8.1f} {quick:8.1f}{'' if direct else '   NOT CHEAP: falls back to Triton'}")
        print(lines[-1], flush=True)
    whole = {"attention of 4096 tokens, whole op": wanted[-1][2], "two layers, head, sample": state.step}
    for label, work in whole.items():
        lines.append(f"{label:40s} {'':8s} {burst(work, 20):8.1f}")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parts: dict[str, Callable[[], list[str]]] = {"check": check, "bench": bench, "host": host, "shapes": shapes}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=parts)
    only = parser.parse_args().only
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, overlap {launch.pdl_supported(0)}", flush=True)
    summary = []
    for name, part in parts.items():
        if only in (None, name):
            start = time.perf_counter()
            summary += [f"-- {name}", *part()]
            print(f"   ({name} took {time.perf_counter() - start:.1f} s)", flush=True)
    print("\n".join(["", *summary]))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
