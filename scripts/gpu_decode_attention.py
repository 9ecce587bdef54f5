"""On a CUDA machine: check decode attention and shared prefixes against float64, and time them against their floor.

    python scripts/gpu_decode_attention.py          # check, time, and try other launch shapes

The floor is the larger of bytes / 4.25 TB/s (each key and value read once) and FLOPs / 790 TFLOP/s, as on an H200.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops")]

import triton.testing  # noqa: E402
from cases import AttentionCase, attention_case  # noqa: E402

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.device_facts import multiprocessors  # noqa: E402
from tokenmill.ops.triton.attention import decode as attention_decode  # noqa: E402
from tokenmill.ops.triton.attention.kv_codes import cache_arguments  # noqa: E402
from tokenmill.ops.triton.attention.paged import attention  # noqa: E402
from tokenmill.ops.triton.attention.shared_prefix import prefix_attention  # noqa: E402
from tokenmill.ops.triton.config import Tile  # noqa: E402
from tokenmill.ops.types import CAUSAL, AttentionBatch, Mask  # noqa: E402

BYTES_PER_S, FLOPS_PER_S = 4.25e12, 790e12
BF16 = torch.bfloat16
LLAMA, QWEN = (32, 8), (16, 8)  # heads and kv heads of 128
BEGUN = time.perf_counter()
TABLE: list[str] = []


def main() -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    failures = sum(not check(*one) for one in checks())
    time_decode()
    time_shared()
    try_launch_shapes()
    print("\n" + "\n".join([f"{failures} checks FAILED" if failures else "all checks passed", *TABLE]), flush=True)
    return int(failures > 0)


def say(line: str, keep: bool = True) -> None:
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)
    if keep:
        TABLE.append(line)


# Checks


def checks() -> list[tuple[str, AttentionCase]]:
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "key_dim": 128, "block_size": 16, "dtype": BF16}
    gemma = {**llama, "heads": 8, "kv_heads": 4, "key_dim": 256}
    latent = {**llama, "heads": 16, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "values_in_keys": True}
    case = partial(attention_case, device="cuda")
    ragged = [900, 700, 5, 2500, 701, 1300]
    pairs = {**llama, "heads": 16}
    return [
        ("one long row", case([1], [6000], **llama)),
        ("ragged rows", case([1] * 6, ragged, **llama)),
        ("window, soft cap, heads of 256", case([1] * 6, ragged, mask=Mask(window=500, softcap=30.0), **gemma)),
        ("latent attention", case([1] * 3, [900, 40, 2000], **latent)),
        ("shared prefix", share(case([1] * 6, ragged, shared=41, **llama), 656, [5, 0, 1, 4, 3], padding=3)),
        ("shared prefix, 2 heads per kv head", share(case([1] * 6, ragged, shared=41, **pairs), 656, [1, 3])),
        ("shared prefix, latent attention", share(case([1] * 3, [900, 700, 800], shared=41, **latent), 656, [0, 1, 2])),
    ]


def share(case: AttentionCase, tokens: int, members: list[int], padding: int = 0) -> AttentionCase:
    set_shared(case.batch, tokens, members, padding)
    return case


def set_shared(batch: AttentionBatch, tokens: int, members: list[int], padding: int = 0) -> None:
    lengths = torch.zeros(len(batch.host_rows), dtype=torch.int32)
    lengths[members] = tokens
    batch.shared_tokens = lengths.cuda()
    batch.shared_members = torch.tensor(members + [-1] * padding, dtype=torch.int32).cuda()


def check(name: str, case: AttentionCase) -> bool:
    """Right, the same bits every time (programs that end in another order), and right when replayed for other rows."""
    try:
        got = case.call(attention)
        error = (got.double() - exact(case)).abs().max().item()
        same = all(torch.equal(case.call(attention), got) for _ in range(100))
        replayed = replay_error(case)
        good = error < 2e-2 and replayed < 2e-2 and same
        say(f"{'ok    ' if good else 'FAILED'} {name}: error {error:.1e}, replayed {replayed:.1e}, stable {same}")
        return good
    except Exception as problem:
        say(f"FAILED {name}: {type(problem).__name__}: {str(problem)[:300]}")
        return False


def exact(case: AttentionCase) -> torch.Tensor:
    wide = AttentionCase(
        case.q.double(), case.k_cache.double(), case.v_cache.double(), case.batch, case.mask, case.scale
    )
    return wide.call(reference.attention)


def replay_error(case: AttentionCase) -> float:
    """A recording made for these rows, replayed when the last one has become one token long and leaves its group."""
    batch = case.batch
    batch.cache.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.call(attention)
    if len(batch.host_context) > 1:
        batch.context[-1] = batch.host_context[-1] = 1
        if batch.shared_tokens is not None and batch.shared_members is not None:
            last = len(batch.host_context) - 1
            left = [row for row in batch.shared_members.tolist() if row not in (-1, last)]
            left += [-1] * (len(batch.shared_members) - len(left))
            batch.shared_members.copy_(torch.tensor(left))
            batch.shared_tokens[-1] = 0
    graph.replay()
    torch.cuda.synchronize()
    batch.cache.clear()
    return (out.double() - exact(case)).abs().max().item()


# Timings


@dataclass
class Load:
    """Some layers of attention, enough that no layer finds its keys in the cache of the one before."""

    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    batch: AttentionBatch
    moved: float  # bytes per layer, shared keys counted once
    flops: float

    def run(self) -> None:
        for k_cache, v_cache in self.caches:
            attention(self.q, k_cache, v_cache, self.batch, CAUSAL, 128**-0.5)

    def us(self, call: Callable[[], Any] | None = None) -> float:
        """Microseconds per layer; the plan of the step is not counted."""
        self.batch.cache.clear()
        self.run()
        torch.cuda.synchronize()  # the timing runs on a stream of its own
        return float(triton.testing.do_bench_cudagraph(call or self.run, rep=15)) * 1e3 / len(self.caches)


def load(shape: tuple[int, int], contexts: list[int], shared: int = 0, told: bool = False) -> Load:
    """Rows of these contexts; the first `shared` tokens are the same blocks. `told`: attention is told so."""
    heads, kv_heads = shape
    rows = len(contexts)
    common = shared // 16
    own = [-(-context // 16) - common for context in contexts]
    order = torch.randperm(common + sum(own), dtype=torch.int32)
    tables = torch.zeros(rows, max(own) + common, dtype=torch.int32)
    at = common
    for row, count in enumerate(own):
        tables[row, : common + count] = torch.cat([order[:common], order[at : at + count]])
        at += count
    keys = shared + sum(contexts) - shared * rows
    moved = 4.0 * keys * kv_heads * 128
    layers = min(8, max(2, int(200e6 / moved)))
    caches = [
        (torch.randn(len(order), 16, kv_heads, 128, device="cuda", dtype=BF16), torch.randn(
            len(order), 16, kv_heads, 128, device="cuda", dtype=BF16))
        for _ in range(layers)
    ]  # fmt: skip
    batch = AttentionBatch(
        rows=torch.arange(rows, dtype=torch.int32, device="cuda"),
        q_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        context=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        block_tables=tables.cuda(),
        num_singles=rows,
        max_query=1,
        max_context=max(contexts),
        host_rows=list(range(rows)),
        host_counts=[1] * rows,
        host_context=contexts,
    )
    if told:
        set_shared(batch, shared, list(range(rows)))
    q = torch.randn(rows, heads, 128, device="cuda", dtype=BF16)
    return Load(q, caches, batch, moved, 4.0 * sum(contexts) * heads * 128)


def report(name: str, work: Load) -> float:
    us = work.us()
    floor = max(work.moved / BYTES_PER_S, work.flops / FLOPS_PER_S) * 1e6
    rates = f"{work.moved / us / 1e6:5.2f} TB/s {work.flops / us / 1e6:5.0f} TFLOP/s"
    say(f"{name:<52} {us:7.1f} us  floor {floor:6.1f} us  {floor / us:4.0%}  {rates}")
    return us


RAGGED = [100 + (k * 977) % 1900 for k in range(256)]


def time_decode() -> None:
    for name, shape, contexts in (
        ("llama3-8b 1 x 300", LLAMA, [300]),
        ("llama3-8b 1 x 8192", LLAMA, [8192]),
        ("llama3-8b 64 x 1000", LLAMA, [1000] * 64),
        ("llama3-8b 256 x 650", LLAMA, [650] * 256),
        ("llama3-8b 256 ragged 100-2000", LLAMA, RAGGED),
        ("llama3-8b 255 x 300 and one of 8192", LLAMA, [300] * 255 + [8192]),
        ("qwen3-0.6b 1 x 300", QWEN, [300]),
        ("qwen3-0.6b 256 x 650", QWEN, [650] * 256),
    ):
        report(name, load(shape, contexts))
    work = load(LLAMA, [650] * 256)

    def plan() -> None:
        attention_decode._make_plan(work.q, 8, 128, work.batch, CAUSAL, "")

    work.run()
    torch.cuda.synchronize()  # the timing runs on a stream of its own
    say(f"the plan of a step of 256 rows: {float(triton.testing.do_bench_cudagraph(plan, rep=10)) * 1e3:.1f} us")


def time_shared() -> None:
    for name, shape in (("llama3-8b", LLAMA), ("qwen3-0.6b", QWEN)):
        for rows, shared in ((256, 2048), (64, 2048), (16, 1024), (8, 1024), (4, 2048), (32, 256)):
            contexts = [shared + 50 + row % 100 for row in range(rows)]
            plain = load(shape, contexts, shared).us()
            together = report(f"{name} {rows} x ({shared} shared + ~100)", load(shape, contexts, shared, told=True))
            saved = (rows - 1) * shared
            say(f"{'':<52} {plain:7.1f} us if not told: {plain / together:.2f} x, keys saved {saved}")


def try_launch_shapes() -> None:
    """Of the prefix kernel alone, then how finely decode is cut."""
    for name, shape in (("llama3-8b", LLAMA), ("qwen3-0.6b", QWEN)):
        work = load(shape, [2148] * 256, 2048, told=True)
        found = []
        tiles = [Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)] + [Tile(128, 64, 8, 5)] * (shape is LLAMA)
        for tile in tiles:
            for splits in (2, 4, 8):
                found.append((time_prefix(work, tile, splits), tile, splits))
        flops = 4.0 * 2048 * 256 * shape[0] * 128
        for us, tile, splits in sorted(found, key=lambda one: one[0])[:3]:
            say(f"best prefix kernel {name}: {us:6.1f} us {flops / us / 1e6:4.0f} TFLOP/s {tile} splits {splits}")
    rule = attention_decode.decode_splits
    for name, contexts in (("1 x 8192", [8192]), ("64 x 1000", [1000] * 64), ("256 ragged", RAGGED)):
        work, figures = load(LLAMA, contexts), []
        for waves in (1, 2, 4, 8, 16):
            for least in (1, 4):
                extra = max(1, waves * multiprocessors(work.q.device) // 8)
                attention_decode.decode_splits = lambda *_, extra=extra, least=least: (extra, least)  # type: ignore
                figures.append((work.us(), f"{waves} waves, at least {least} tiles"))
        attention_decode.decode_splits = rule
        figures.sort()
        best, worst = figures[0], figures[-1]
        say(f"best cut of {name}: {best[1]}, {best[0]:.1f} us (worst {worst[0]:.1f}; the rule's {work.us():.1f})")


def time_prefix(work: Load, tile: Tile, splits: int) -> float:
    rows, heads = work.q.shape[:2]
    partial_sums = torch.empty(rows * splits, heads, 128, device="cuda")
    stats = torch.empty(rows * splits, heads, 2, device="cuda")

    def run() -> None:
        for k, v in work.caches:
            cache = cache_arguments(k, v, None)
            prefix_attention(work.q, cache, partial_sums, stats, work.batch, CAUSAL, 128**-0.5, tile, splits)

    try:
        return work.us(run)
    except Exception as problem:
        say(f"{tile} failed: {type(problem).__name__}: {str(problem)[:100]}", keep=False)
        return float("inf")


if __name__ == "__main__":
    sys.exit(main())
