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
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.triton.moe import experts as moe  # noqa: E402
from tokenmill.ops.triton.moe import few as moe_few  # noqa: E402
from tokenmill.ops.triton.moe import route as moe_route  # noqa: E402
from tokenmill.ops.triton.moe.few import FewTile  # noqa: E402
from tokenmill.ops.triton.moe.grouped import ExpertTile, down_rows, gate_up_rows  # noqa: E402
from tokenmill.ops.triton.moe.hopper import BLOCK_M, down_rows_hopper, gate_up_rows_hopper  # noqa: E402
from tokenmill.ops.triton.moe.scores import ScoresShape, router_scores, split_scores  # noqa: E402
from tokenmill.ops.triton.norm import add_rms_norm  # noqa: E402

BYTES_PER_S, FLOPS_PER_S = 4.25e12, 790e12
HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
BF16 = torch.bfloat16
HOPPER = ExpertTile(0, 0, 0, 0, 0)  # stands for the products of moe/hopper.py

FEW_GATE_UP = [FewTile(rows, warps) for rows, warps in ((2, 4), (4, 4), (4, 8), (8, 8))]
FEW_DOWN = [FewTile(rows, warps) for rows, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4))]
NARROW = [(64, 128, 4, 4), (128, 64, 8, 5), (128, 128, 8, 3)]
DEEP = [(4, 8, False), (4, 8, True), (3, 8, True), (4, 4, True)]  # stages, group, bulk
FLAT = [(4, 8, False), (4, 8, True)]
LARGE_GATE_UP = [ExpertTile(128, 128, 64, 8, *more) for more in DEEP] + [
    ExpertTile(64, 128, 64, 4, *more) for more in FLAT
]
LARGE_DOWN = [ExpertTile(128, 256, 64, 8, *more) for more in DEEP] + [
    ExpertTile(64, 256, 64, 4, *more) for more in FLAT
]
LARGE_DOWN.append(ExpertTile(128, 128, 64, 4, 4, 8, bulk=True))
SCORES = {
    64: [ScoresShape(16, n, 128, parts, 4, 2) for n, parts in ((32, 8), (16, 8), (32, 16), (64, 8))],
    256: [ScoresShape(*s) for s in ((16, 64, 128, 8, 4, 2), (16, 64, 64, 8, 4, 3), (32, 64, 128, 8, 4, 2))],
    512: [ScoresShape(*s) for s in ((32, 64, 128, 8, 4, 2), (64, 128, 64, 8, 4, 3), (32, 128, 64, 8, 4, 3))],
    1024: [ScoresShape(*s) for s in ((64, 128, 64, 8, 4, 3), (32, 128, 64, 4, 4, 3), (128, 128, 64, 8, 8, 3))],
    8192: [ScoresShape(*s) for s in ((128, 128, 64, 2, 8, 3), (64, 128, 64, 2, 4, 3), (128, 128, 64, 4, 8, 3))],
}


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
    parser.add_argument("--hopper-only", action="store_true", help="check the products of moe/hopper.py and no more")
    arguments = parser.parse_args()
    if arguments.hopper_only:
        return check_hopper(make_layer(EXPERTS))
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
    specialised = hopper_works()
    layer = make_layer(EXPERTS)
    wrong = check(layer) + check_chains(layer) + ([] if specialised else ["moe_hopper"])
    if not arguments.no_sweep:
        sweep(layer, specialised)
        library(layer)
    timings(layer, specialised)
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


def hopper_works() -> bool:
    """In a process of its own: warpgroups that wait for each other forever must not take the rest along."""
    try:
        return subprocess.run([sys.executable, __file__, "--hopper-only"], timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        print("moe_hopper: not done after 60 s", flush=True)
        return False


def check_hopper(layer: Layer) -> int:
    worst = 0.0
    for count in (9, 300, 3000, 8192):
        for chosen in ("routed", "skewed"):
            x = tokens_of(count)
            weights, experts = routed(x, layer)
            if chosen == "skewed":  # long groups, and experts without tokens
                experts = experts // 16 * 5
            results = [moe.grouped(x, weights, experts, layer.gate_up, layer.down, "silu", None) for _ in range(5)]
            plain = moe.grouped(x, weights, experts, layer.gate_up, layer.down, "silu", moe.shapes(100, BF16))
            off = float((results[0].float() - plain.float()).norm() / plain.float().norm())
            same = all(torch.equal(results[0], other) for other in results)
            worst = max(worst, off if same and off == off else float("inf"))
            print(f"moe_hopper {count:5} tokens, {chosen}: off by {off:.1e}, repeatable {same}", flush=True)
    return int(not worst < 4e-3)


def check_chains(layer: Layer) -> list[str]:
    """Kernels that start before their predecessors have ended must not see what is not there yet: many layers in one
    graph, replayed with new tokens, against the same kernels one at a time.
    """
    wrong = []
    gain = torch.ones(HIDDEN, device="cuda", dtype=BF16)

    def chain(x: torch.Tensor, wait: Callable[[], object]) -> torch.Tensor:
        update, residual = x * 0.5, x * 1.0
        for _ in range(12):
            normed, residual = add_rms_norm(update, residual, gain, 1e-6)
            wait()
            weights, experts = routed(normed, layer)
            wait()
            update = moe.moe(normed, weights, experts, layer.gate_up, layer.down, "silu")
            wait()
        return residual

    for count in (1, 2, 8, 64, 300, 2000):
        x = tokens_of(count)
        chain(x, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(x, lambda: None)
        unlike, finite = 0, True
        for _ in range(20):
            x.copy_(tokens_of(count))
            graph.replay()
            right = chain(x, torch.cuda.synchronize)
            unlike += not torch.equal(got, right)
            finite &= bool(right.isfinite().all())
        print(f"check {count:5} tokens, 12 layers: {unlike} of 20 replays differ, finite {finite}", flush=True)
        wrong += [f"chain of {count}"] if unlike or not finite else []
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


def timings(layer: Layer, specialised: bool) -> None:
    print("\nwhat the ops choose themselves; experts' weights are the bytes", flush=True)
    both = 3 * INNER * HIDDEN
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192):
        rounds = max(1, 32 // count)
        xs = [tokens_of(count) for _ in range(rounds)]
        routes = [routed(x, layer) for x in xs]
        experts_moved = sum(weight_bytes(experts, both) for _, experts in routes) / rounds
        flops = 2 * count * TOP_K * both

        def one(way: Callable[..., torch.Tensor], *more: object, xs=xs, routes=routes) -> list[Callable[[], object]]:
            args = [(x, *route, layer.gate_up, layer.down, "silu", *more) for x, route in zip(xs, routes)]
            return [lambda a=a: way(*a) for a in args]

        fast = 10 if count < 512 else 3
        whole = [lambda x=x: moe.moe(x, *routed(x, layer), layer.gate_up, layer.down, "silu") for x in xs]
        print(line(f"route and moe {count} tokens", seconds(whole, fast), experts_moved, flops), flush=True)
        print(line(f"    moe {count} tokens", seconds(one(moe.moe), fast), experts_moved, flops), flush=True)
        if count >= 256 and specialised:
            taken = seconds(one(moe.grouped, None), fast)
            print(line(f"    hopper {count} tokens", taken, experts_moved, flops), flush=True)
        if 2 <= count <= 8:
            taken = seconds(one(moe_few.few, moe_few.few_shapes(BF16)))
            print(line(f"    as few {count} tokens", taken, experts_moved, flops), flush=True)
            taken = seconds(one(moe.grouped, moe.shapes(1, BF16)))
            print(line(f"    grouped {count} tokens", taken, experts_moved, flops), flush=True)
        x, (weights, experts) = xs[0], routes[0]
        products = torch.zeros(count * TOP_K, HIDDEN, device="cuda", dtype=BF16)
        parts = {
            "route": lambda x=x: routed(x, layer),
            "scores": lambda x=x: router_scores(x, layer.router),
            "group": lambda experts=experts: moe_route.group_by_expert(experts, EXPERTS, 128),
            "join": lambda products=products, weights=weights: moe.join(products, weights),
        }
        costs = ", ".join(f"{name} {seconds([call] * 4, fast) * 1e6:.1f}" for name, call in parts.items())
        print(f"    us: {costs}", flush=True)


def library(layer: Layer) -> None:
    """What torch's own grouped product takes for rows that are sorted already: the rate to reach."""
    if not hasattr(torch, "_grouped_mm"):
        return
    for count in (1024, 8192):
        choices = count * TOP_K
        experts = routed(tokens_of(count), layer)[1]
        ends = torch.bincount(experts.flatten(), minlength=EXPERTS).cumsum(0).int()
        for name, weight in (("gate_up", layer.gate_up), ("down", layer.down)):
            rows = torch.randn(choices, weight.shape[2], device="cuda", dtype=BF16)
            call = partial(torch._grouped_mm, rows, weight.transpose(1, 2), offs=ends)
            taken = attempt(lambda call=call: seconds([call] * 2, 3))
            flops = 2 * choices * weight[0].numel()
            print(line(f"torch._grouped_mm {name} {count} tokens", taken, weight.nbytes, flops), flush=True)


# Other launch shapes


def compile_part(part: int, jobs: int) -> None:
    """Call one shape after the other on a small layer, so that the compiler's cache has them."""
    layer = make_layer(16)
    x = tokens_of(32)
    weights, experts = routed(x, layer)
    args = (x, weights, experts, layer.gate_up, layer.down, "silu")
    ones = moe_few.few_shapes(BF16)
    todo: list[Callable[[], object]] = [lambda s=s: moe_few.few(*args, (s, ones[1])) for s in FEW_GATE_UP]
    todo += [lambda s=s: moe_few.few(*args, (ones[0], s)) for s in FEW_DOWN]
    todo += [lambda s=s: split_scores(x, layer.router, s) for some in SCORES.values() for s in some]
    for block_m in (16, 32, 64):
        todo += [lambda s=s: moe.grouped(*args, (s, s)) for s in narrow(block_m)]
    for block_m in (64, 128):
        ups = [shape for shape in LARGE_GATE_UP if shape.block_m == block_m]
        downs = [shape for shape in LARGE_DOWN if shape.block_m == block_m]
        groups = moe_route.group_by_expert(experts, 16, block_m)
        active = torch.zeros(experts.numel(), INNER, device="cuda", dtype=BF16)
        todo += [lambda s=s, g=groups: gate_up_rows(x, g, TOP_K, layer.gate_up, "silu", s) for s in ups]
        todo += [lambda s=s, g=groups, a=active: down_rows(a, g, layer.down, s) for s in downs]
    for choices_per_expert in (1, 16, 40, 100):
        todo.append(lambda c=choices_per_expert: moe.grouped(*args, moe.shapes(c, BF16)))
    todo += [lambda n=n: routed(tokens_of(n), layer) for n in (1, 100, 300, 600)]
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


def narrow(block_m: int) -> list[ExpertTile]:
    return [ExpertTile(block_m, *shape, bulk=bulk) for shape in NARROW for bulk in (False, True)]


def sweep(layer: Layer, specialised: bool) -> None:
    for count in (1, 4):
        sweep_few(layer, count)
    for count, shapes in SCORES.items():
        x = tokens_of(count)
        calls = {s: [lambda s=s, x=x: split_scores(x, layer.router, s)] * 4 for s in shapes}
        found = {astuple(s): attempt(lambda one=one: seconds(one, 5)) for s, one in calls.items()}
        show(f"scores {count} tokens (m, n, k, parts, warps, stages)", found)
    for count, block_ms in ((64, (16,)), (256, (16, 32)), (512, (32,))):
        for block_m in block_ms:
            sweep_grouped(layer, count, narrow(block_m), narrow(block_m))
    for count in (512, 1024, 2048, 8192):
        for block_m in (64, 128):
            ups = [shape for shape in LARGE_GATE_UP if shape.block_m == block_m]
            downs = [shape for shape in LARGE_DOWN if shape.block_m == block_m]
            sweep_grouped(layer, count, ups, downs, specialised and block_m == BLOCK_M)


def sweep_few(layer: Layer, count: int) -> None:
    """Each kernel's shape on its own, the other one fixed."""
    rounds = 16 // count
    xs = [tokens_of(count) for _ in range(rounds)]
    routes = [routed(x, layer) for x in xs]

    def calls(launch: tuple[FewTile, FewTile]) -> list[Callable[[], object]]:
        args = [(x, *route, layer.gate_up, layer.down, "silu", launch) for x, route in zip(xs, routes)]
        return [lambda a=a: moe_few.few(*a) for a in args]

    fixed = moe_few.few_shapes(BF16)
    for name, launches in (
        ("gate_up", {astuple(s): (s, fixed[1]) for s in FEW_GATE_UP}),
        ("down", {astuple(s): (fixed[0], s) for s in FEW_DOWN}),
    ):
        found = {shape: attempt(lambda pair=pair: seconds(calls(pair))) for shape, pair in launches.items()}
        show(f"few {count} tokens, both kernels, {name} (rows, warps)", found)


def sweep_grouped(
    layer: Layer, count: int, ups: list[ExpertTile], downs: list[ExpertTile], specialised: bool = False
) -> None:
    x = tokens_of(count)
    _, experts = routed(x, layer)
    groups = moe_route.group_by_expert(experts, EXPERTS, ups[0].block_m)
    active = gate_up_rows(x, groups, TOP_K, layer.gate_up, "silu", ups[0])
    fast = 10 if count < 512 else 3
    for name, shapes, per_expert, kernel in (
        ("gate_up", ups, 2 * INNER * HIDDEN, partial(gate_up_rows, x, groups, TOP_K, layer.gate_up, "silu")),
        ("down", downs, INNER * HIDDEN, partial(down_rows, active, groups, layer.down)),
    ):
        found = {s: attempt(lambda s=s, kernel=kernel: seconds([lambda: kernel(s)] * 2, fast)) for s in shapes}
        if specialised:
            calls = {
                "gate_up": partial(gate_up_rows_hopper, x, groups, TOP_K, layer.gate_up, "silu"),
                "down": partial(down_rows_hopper, active, groups, layer.down),
            }
            found[HOPPER] = attempt(lambda call=calls[name]: seconds([call] * 2, fast))
        best = min(found.values())
        moved, flops = weight_bytes(experts, per_expert), 2 * experts.numel() * per_expert
        label = line(f"{name} {count} tokens, block_m {ups[0].block_m}", best, moved, flops)
        named = {astuple(s)[1:]: taken for s, taken in found.items()}
        show(f"{label}\n    (n, k, warps, stages, group, bulk)", named)


def show(label: str, found: dict[tuple[int, ...], float]) -> None:
    ranked = sorted(found, key=lambda shape: found[shape])
    print(f"{label}: " + "  ".join(f"{shape} {found[shape] * 1e6:.1f}" for shape in ranked), flush=True)


if __name__ == "__main__":
    sys.exit(main())
