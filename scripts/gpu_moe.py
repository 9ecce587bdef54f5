"""On a CUDA machine: check the mixture of experts against float32, time it against its floor, and try launch shapes.

    python scripts/gpu_moe.py              # check, time and sweep the shape of Qwen3-30B-A3B
    python scripts/gpu_moe.py --no-sweep

The floor is the larger of bytes / 4.25 TB/s (weights of the experts chosen, once) and FLOPs / 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.triton import moe, moe_route  # noqa: E402
from tokenmill.ops.triton.moe import FewShape, Shape  # noqa: E402

BYTES_PER_S, FLOPS_PER_S = 4.25e12, 790e12
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
BF16 = torch.bfloat16

FEW = [FewShape(rows, warps) for rows in (2, 4, 8) for warps in (4, 8)]
NARROW = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 5), (64, 256, 4, 2), (128, 64, 4, 4), (128, 128, 8, 3)]
LARGE_GATE_UP = [
    Shape(128, 128, 64, 8, 4, 8),
    Shape(128, 128, 64, 8, 3, 8),
    Shape(128, 128, 64, 8, 4, 2),
    Shape(128, 128, 64, 8, 4, 32),
    Shape(128, 64, 64, 4, 4, 8),
    Shape(128, 64, 64, 8, 4, 8),
    Shape(64, 128, 64, 4, 4, 8),
]
LARGE_DOWN = [
    Shape(128, 256, 64, 8, 4, 8),
    Shape(128, 256, 64, 8, 3, 8),
    Shape(128, 256, 64, 8, 4, 32),
    Shape(128, 128, 64, 4, 4, 8),
    Shape(128, 128, 64, 8, 4, 8),
    Shape(64, 256, 64, 4, 4, 8),
]


@dataclass
class Layer:
    gate_up: torch.Tensor
    down: torch.Tensor
    router: torch.Tensor


def make_layer(experts: int) -> Layer:
    torch.manual_seed(0)
    gate_up = torch.randn(experts, 2 * INNER, HIDDEN, device="cuda", dtype=BF16) * HIDDEN**-0.5
    down = torch.randn(experts, HIDDEN, INNER, device="cuda", dtype=BF16) * INNER**-0.5
    return Layer(gate_up, down, torch.randn(experts, HIDDEN, device="cuda") * 0.05)


def tokens_of(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, device="cuda", dtype=BF16)


def routed(x: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    return moe_route.route(x, layer.router, TOP_K, True, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile the shapes of the sweep")
    parser.add_argument("--part", type=int, help="compile only this part (what the processes are started with)")
    arguments = parser.parse_args()
    if arguments.part is not None:
        compile_part(arguments.part, arguments.jobs)
        return 0
    begun = time.perf_counter()
    if not arguments.no_sweep:
        command = [sys.executable, __file__, "--jobs", str(arguments.jobs), "--part"]
        compilers = [subprocess.Popen([*command, str(part)]) for part in range(arguments.jobs)]
        for compiler in compilers:
            compiler.wait()
    print(f"{torch.cuda.get_device_name()}: compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    layer = make_layer(EXPERTS)
    wrong = check(layer)
    if not arguments.no_sweep:
        sweep(layer)
    timings(layer)
    print(f"{'FAILED: ' + ', '.join(wrong) if wrong else 'checks passed'} ({time.perf_counter() - begun:.0f} s)")
    return int(bool(wrong))


# Checks


def check(layer: Layer) -> list[str]:
    wrong = []
    wide_gate_up, wide_down = layer.gate_up.float(), layer.down.float()
    for count in (1, 3, 8, 9, 64, 200, 600, 3000):
        x = tokens_of(count)
        weights, experts = routed(x, layer)
        exact = (x.double() @ layer.router.double().T).softmax(-1)
        best, indices = exact.topk(TOP_K, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        unlike = int((experts.long() != indices).any(-1).sum())
        off = float((weights - best).abs().max())
        right = reference.moe(x.float(), weights, experts, wide_gate_up, wide_down, "silu")
        got = moe.moe(x, weights, experts, layer.gate_up, layer.down, "silu")
        again = moe.moe(x, weights, experts, layer.gate_up, layer.down, "silu")
        plain = reference.moe(x, weights, experts, layer.gate_up, layer.down, "silu")
        error, plain_error = (float((y.float() - right).norm() / right.norm()) for y in (got, plain))
        good = error < 1.2 * plain_error and off < 1e-4 and unlike <= count // 500 + 1 and torch.equal(got, again)
        wrong += [] if good else [f"{count} tokens"]
        print(
            f"check {count:5} tokens: error {error:.2e} (plain torch in bf16 {plain_error:.2e}), routing: "
            f"{unlike} tokens differ, weights off by {off:.1e}, repeatable {torch.equal(got, again)}",
            flush=True,
        )
    return wrong


# Timings


def seconds(calls: list[Callable[[], object]], replays: int = 10) -> float:
    """Device time of one call, in a graph of all of them: calls with other experts keep the cache honest."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / replays / len(calls)


def line(name: str, taken: float, moved: float, flops: float = 0.0) -> str:
    floor = max(moved / BYTES_PER_S, flops / FLOPS_PER_S)
    rates = f"{moved / taken / 1e12:5.2f} TB/s {flops / taken / 1e12:5.0f} TFLOP/s"
    return f"{name:<44} {taken * 1e6:8.1f} us  floor {floor * 1e6:7.1f}  {floor / taken:4.0%}  {rates}"


def weight_bytes(experts: torch.Tensor, per_expert: int) -> int:
    return 2 * per_expert * int(experts.unique().numel())


def timings(layer: Layer) -> None:
    print("\nwhat the op chooses itself; experts' weights are the bytes", flush=True)
    both = 3 * INNER * HIDDEN
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192):
        rounds = max(1, 32 // count)
        xs = [tokens_of(count) for _ in range(rounds)]
        routes = [routed(x, layer) for x in xs]
        experts_moved = sum(weight_bytes(experts, both) for _, experts in routes) / rounds
        flops = 2 * count * TOP_K * both

        def one(way: Callable[..., torch.Tensor], *more: object, xs=xs, routes=routes) -> list[Callable[[], object]]:
            args = [(x, *route, layer.gate_up, layer.down, "silu", *more) for x, route in zip(xs, routes)]
            return [lambda a=a: way(*a) for a in args]

        fast = 10 if count < 512 else 3
        print(line(f"moe {count} tokens", seconds(one(moe.moe), fast), experts_moved, flops), flush=True)
        if 2 <= count <= 16:
            taken = seconds(one(moe.few, moe.few_shapes(BF16)))
            print(line(f"    as few {count} tokens", taken, experts_moved, flops), flush=True)
            taken = seconds(one(moe.grouped, moe.shapes(1, BF16)))
            print(line(f"    grouped {count} tokens", taken, experts_moved, flops), flush=True)
        x, (_, experts) = xs[0], routes[0]
        scores = moe_route.router_scores(x, layer.router)
        parts = {
            "scores": lambda x=x: moe_route.router_scores(x, layer.router),
            "scores in torch": lambda x=x: F.linear(x.float(), layer.router),
            "choose": lambda scores=scores: moe_route.choose(scores, TOP_K, True, 1.0),
            "group": lambda experts=experts: moe_route.group_by_expert(experts, EXPERTS, 16),
        }
        costs = ", ".join(f"{name} {seconds([call] * 4, fast) * 1e6:.1f}" for name, call in parts.items())
        print(f"    us: {costs}", flush=True)


# Other launch shapes


def compile_part(part: int, jobs: int) -> None:
    """Call one shape after the other on a small layer, so that the compiler's cache has them."""
    layer = make_layer(16)
    x = tokens_of(32)
    weights, experts = routed(x, layer)
    args = (x, weights, experts, layer.gate_up, layer.down, "silu")
    todo: list[Callable[[], object]] = [lambda s=s: moe.few(*args, (s, s)) for s in FEW]
    for block_m in (16, 32, 64):
        narrow = [Shape(block_m, *shape) for shape in NARROW]
        todo += [lambda s=s: moe.grouped(*args, (s, s)) for s in narrow]
    for block_m in (64, 128):
        ups = [shape for shape in LARGE_GATE_UP if shape.block_m == block_m]
        downs = [shape for shape in LARGE_DOWN if shape.block_m == block_m]
        groups = moe_route.group_by_expert(experts, 16, block_m)
        active = torch.zeros(experts.numel(), INNER, device="cuda", dtype=BF16)
        todo += [lambda s=s, g=groups: moe.gate_up_rows(x, g, TOP_K, layer.gate_up, "silu", s) for s in ups]
        todo += [lambda s=s, g=groups, a=active: moe.down_rows(a, g, layer.down, s) for s in downs]
    for choices_per_expert in (1, 16, 40, 100):
        todo.append(lambda c=choices_per_expert: moe.grouped(*args, moe.shapes(c, BF16)))
    todo += [lambda n=n: routed(tokens_of(n), layer) for n in (1, 300, 600)]
    for number, call in enumerate(todo):
        if number % jobs == part:
            attempt(call)
    torch.cuda.synchronize()


def attempt(call: Callable[[], float | object]) -> float:
    """Seconds, or infinity for a shape that the device cannot run."""
    try:
        result = call()
    except Exception as error:
        print(f"    {type(error).__name__}: {str(error)[:100]}", flush=True)
        return float("inf")
    return result if isinstance(result, float) else 0.0


def sweep(layer: Layer) -> None:
    for count in (1, 4):
        sweep_few(layer, count)
    for count, block_ms in ((64, (16, 32)), (256, (16, 32, 64))):
        for block_m in block_ms:
            shapes = [Shape(block_m, *shape) for shape in NARROW]
            sweep_grouped(layer, count, shapes, shapes)
    for count in (1024, 8192):
        for block_m in (64, 128):
            ups = [shape for shape in LARGE_GATE_UP if shape.block_m == block_m]
            downs = [shape for shape in LARGE_DOWN if shape.block_m == block_m]
            sweep_grouped(layer, count, ups, downs)


def sweep_few(layer: Layer, count: int) -> None:
    """Each kernel's shape on its own, the other one fixed."""
    rounds = 16 // count
    xs = [tokens_of(count) for _ in range(rounds)]
    routes = [routed(x, layer) for x in xs]

    def calls(launch: tuple[FewShape, FewShape]) -> list[Callable[[], object]]:
        args = [(x, *route, layer.gate_up, layer.down, "silu", launch) for x, route in zip(xs, routes)]
        return [lambda a=a: moe.few(*a) for a in args]

    fixed = moe.few_shapes(BF16)
    for name, launches in (
        ("gate_up", {(s.rows, s.num_warps): (s, fixed[1]) for s in FEW}),
        ("down", {(s.rows, s.num_warps): (fixed[0], s) for s in FEW}),
    ):
        found = {shape: attempt(lambda pair=pair: seconds(calls(pair))) for shape, pair in launches.items()}
        show(f"few {count} tokens, both kernels, {name} (rows, warps)", found)


def sweep_grouped(layer: Layer, count: int, ups: list[Shape], downs: list[Shape]) -> None:
    x = tokens_of(count)
    _, experts = routed(x, layer)
    groups = moe_route.group_by_expert(experts, EXPERTS, ups[0].block_m)
    active = moe.gate_up_rows(x, groups, TOP_K, layer.gate_up, "silu", ups[0])
    fast = 10 if count < 512 else 3
    for name, shapes, per_expert, kernel in (
        ("gate_up", ups, 2 * INNER * HIDDEN, lambda s: moe.gate_up_rows(x, groups, TOP_K, layer.gate_up, "silu", s)),
        ("down", downs, INNER * HIDDEN, lambda s: moe.down_rows(active, groups, layer.down, s)),
    ):
        found = {s: attempt(lambda s=s, kernel=kernel: seconds([lambda: kernel(s)] * 2, fast)) for s in shapes}
        best = min(found.values())
        moved, flops = weight_bytes(experts, per_expert), 2 * experts.numel() * per_expert
        label = line(f"{name} {count} tokens, block_m {ups[0].block_m}", best, moved, flops)
        named = {(s.block_n, s.block_k, s.num_warps, s.num_stages, s.group): taken for s, taken in found.items()}
        show(f"{label}\n    (n, k, warps, stages, group)", named)


def show(label: str, found: dict[tuple[int, ...], float]) -> None:
    ranked = sorted(found, key=lambda shape: found[shape])
    print(f"{label}: " + "  ".join(f"{shape} {found[shape] * 1e6:.1f}" for shape in ranked), flush=True)


if __name__ == "__main__":
    sys.exit(main())
