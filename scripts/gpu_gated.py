"""On a Hopper GPU: a feed-forward block with the activation inside of the product of gate and up, against behind it.

    python scripts/gpu_gated.py                # decode steps: few rows, recorded, weights that no cache holds
    python scripts/gpu_gated.py --prompts      # many rows, each going on for 0.4 s, so that the power limit counts
    python scripts/gpu_gated.py --plain        # few rows streamed through other weights, against what else there is

Times are microseconds of one block: norm, gate and up, activation, down; with --plain of a norm and a product.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenmill.ops.matmul import MatmulKernel, dense_need, matmul_kernels
from tokenmill.ops.triton.activation import act_mul
from tokenmill.ops.triton.gemm.gated import gated_gemm
from tokenmill.ops.triton.gemm.gated_few import gated_few
from tokenmill.ops.triton.gemm.stream import stream_gemm
from tokenmill.ops.triton.norm import add_rms_norm, rms_norm
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Linear

MODELS = {
    "qwen2.5-7b": (3584, 18944),
    "llama3-8b": (4096, 14336),
    "llama3.2-1b": (2048, 8192),
    "qwen3-0.6b": (1024, 3072),
}
PLAIN = ((4608, 3584), (3584, 3584), (3584, 18944), (6144, 4096), (4096, 14336), (4096, 1024), (1024, 3072), (960, 576))
ROWS, PROMPTS = (1, 2, 8, 16, 32, 48, 64, 80, 96, 128), (256, 512, 1024, 2048, 8192)
LAYERS_BYTES = 1 << 30
Gate = Callable[[torch.Tensor, Linear], torch.Tensor]


def linear(columns: int, inner: int) -> Linear:
    scheme = Dense()
    storage = scheme.allocate(columns, inner, torch.bfloat16, torch.device("cuda"))
    storage["weight"].normal_(0, 0.02)
    return Linear(scheme, storage)


def behind(x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
    return act_mul(gate_up(x), "silu")


def inside(x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
    return (gated_few if x.shape[0] <= 128 else gated_gemm)(x, gate_up.storage["weight"], "silu")


def recorded(run: Callable[[], object], times: int = 15) -> float:
    """Microseconds of a replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found)


class Chain:
    """Feed-forward blocks one after the other, more than a cache holds."""

    def __init__(self, hidden: int, inner: int) -> None:
        self.layers = max(2, LAYERS_BYTES // (6 * hidden * inner))
        self._blocks = [(linear(2 * inner, hidden), linear(hidden, inner)) for _ in range(self.layers)]
        self._norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")

    def run(self, gate: Gate, x: torch.Tensor) -> None:
        update, residual = x.clone(), torch.zeros_like(x)
        for gate_up, down in self._blocks:
            mixed, residual = add_rms_norm(update, residual, self._norm, 1e-6)
            update = down(gate(mixed, gate_up))

    def time(self, gate: Gate, x: torch.Tensor, seconds: float) -> float:
        """Microseconds of a block."""
        once = recorded(partial(self.run, gate, x))
        return recorded(partial(self.run, gate, x), 5 + int(1e6 * seconds / once)) / self.layers


def time_plain() -> None:
    print(f"{'columns x inner':>14s} {'rows':>5s} {'others':>8s} {'streamed':>8s}")
    for columns, inner in PLAIN:
        copies = [linear(columns, inner) for _ in range(max(2, LAYERS_BYTES // (8 * columns * inner)))]
        norm = torch.ones(inner, dtype=torch.bfloat16, device="cuda")
        others = [one for one in matmul_kernels("cuda") if one.name in ("few rows", "the matrix library")]
        for rows in (2, 8, 16, 32, 64, 128, 256):
            x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")

            def run(kernel: MatmulKernel | None, copies: list[Linear] = copies, x: torch.Tensor = x) -> None:
                for one in copies:
                    mixed, weight = rms_norm(x, norm, 1e-6), one.storage["weight"]  # noqa: B023
                    if kernel is None:
                        stream_gemm(mixed, weight, None, one.storage["counters"])
                    else:
                        kernel.run(dense_need(weight, x.dtype), mixed, one.storage, None)

            before = min(recorded(partial(run, one)) for one in others) / len(copies)
            streamed = recorded(partial(run, None)) / len(copies)
            print(f"{columns:6d} x {inner:5d} {rows:5d} {before:8.1f} {streamed:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    if arguments.plain:
        time_plain()
        return
    print(f"{'':12s} {'rows':>5s} {'behind':>8s} {'inside':>8s}")
    for name, (hidden, inner) in MODELS.items():
        chain = Chain(hidden, inner)
        for rows in PROMPTS if arguments.prompts else ROWS:
            x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
            found = [chain.time(gate, x, 0.4 * arguments.prompts) for gate in (behind, inside)]
            print(f"{name:12s} {rows:5d} {found[0]:8.1f} {found[1]:8.1f}", flush=True)


if __name__ == "__main__":
    main()
