"""On a CUDA machine: experts in small numbers, checked against plain torch and timed beside experts of bfloat16.

    python scripts/gpu_moe_codes.py

The shape is that of Qwen3-30B-A3B. The floor is reading the codes of the experts chosen, once, at 4.25 TB/s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_moe import BYTES_PER_S, EXPERTS, HIDDEN, INNER, TOP_K, make_layer, routed, tokens_of  # noqa: E402

from tokenmill.ops.triton.moe import codes, experts  # noqa: E402
from tokenmill.quant.forms import parse_form  # noqa: E402
from tokenmill.quant.schemes.expert_codes import ExpertCodes  # noqa: E402
from tokenmill.quant.schemes.experts import Experts, allocate_experts, moe_each  # noqa: E402

FORMS = ("int8", "int4-g32", "int4-g128", "w8a8", "fp8")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
REPEATS = 50


def coded(weights: torch.Tensor, form: str) -> Experts:  # [experts, rows, columns]
    made = allocate_experts(ExpertCodes(parse_form(form)), *weights.shape, weights.dtype, weights.device)
    for storage, weight in zip(made.storages, weights, strict=True):
        made.scheme.write(storage, 0, weight)
    return made


def microseconds(run: Callable[[], object]) -> float:
    """Of one run in a recorded graph of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / REPEATS


def main() -> int:
    layer, wrong = make_layer(EXPERTS), 0
    inputs = {count: tokens_of(count) for count in TOKENS}
    routes = {count: routed(x, layer) for count, x in inputs.items()}
    times = {
        count: microseconds(lambda x=x, r=routes[count]: experts.moe(x, *r, layer.gate_up, layer.down, "silu"))
        for count, x in inputs.items()
    }
    print("us of a layer:", ", ".join(f"{count} tokens {time:.1f}" for count, time in times.items()), "(bfloat16)")
    for form in FORMS:
        gate_up, down = coded(layer.gate_up, form), coded(layer.down, form)
        op, cells = codes.moe_w8a8 if form == "w8a8" else codes.moe_codes, []
        for count, x in inputs.items():
            found = op(x, *routes[count], gate_up.operand, down.operand, "silu").float()
            expected = moe_each(x.float(), *routes[count], gate_up, down, "silu")
            error = float((found - expected).norm() / expected.norm())
            wrong += error > 1e-2
            took = microseconds(partial(op, x, *routes[count], gate_up.operand, down.operand, "silu"))
            chosen = int(routes[count][1].unique().numel())
            size = chosen * sum(
                gate_up.scheme.nbytes(*shape, x.dtype) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
            )
            floor = 1e6 * size / BYTES_PER_S
            cells.append(
                f"{count} tokens {took:.1f} ({times[count] / took:.2f} x bfloat16, {floor / took:.0%} of the floor)"
            )
        print(f"{form}: {', '.join(cells)}")
    print(f"{wrong} wrong; top {TOP_K} of {EXPERTS} experts of {HIDDEN} x {INNER}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
