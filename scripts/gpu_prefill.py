"""On a CUDA machine: check and time prefill attention, the fused rope kernel and what a launch costs the host.

    python scripts/gpu_prefill.py

Every variant is compiled and checked in a process of its own, side by side and with a time limit (a kernel that waits
for itself must not take the others along); those that pass are timed one after the other. Ceilings: 4.25 TB/s and
790 TFLOP/s, as measured on an H200.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops")]

import triton.testing  # noqa: E402
from cases import rope_case  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.triton import norm, rope  # noqa: E402
from tokenmill.ops.triton.attention import fresh as attention_fresh  # noqa: E402
from tokenmill.ops.triton.attention import prefill as attention_prefill  # noqa: E402
from tokenmill.ops.triton.attention.fresh import Launch  # noqa: E402
from tokenmill.ops.triton.config import Tile  # noqa: E402
from tokenmill.ops.types import CAUSAL, AttentionBatch, Mask  # noqa: E402

BYTES_PER_S, FLOPS_PER_S = 4.25e12, 790e12
BF16 = torch.bfloat16
CHECK_SECONDS = 75
MOST_ERROR = 0.02

# What is tried: the kernel of gathered keys in several shapes, and the paged kernel in several shapes.
GATHERED = {
    "hopper 128x128 s2": Launch(Tile(128, 128, 4, 2), hopper=True),
    "hopper 128x64 s3": Launch(Tile(128, 64, 4, 3), hopper=True),
    "gathered 128x128 w8 s2": Launch(Tile(128, 128, 8, 2)),
    "gathered 128x64 w8 s2": Launch(Tile(128, 64, 8, 2)),
    "gathered 128x64 w8 s3": Launch(Tile(128, 64, 8, 3)),
    "gathered 64x64 w4 s2": Launch(Tile(64, 64, 4, 2)),
    "gathered 64x128 w4 s2": Launch(Tile(64, 128, 4, 2)),
}
PAGED = {
    "paged 128x64 w8 s5": Tile(128, 64, 8, 5),
    "paged 128x64 w8 s3": Tile(128, 64, 8, 3),
    "paged 128x128 w8 s3": Tile(128, 128, 8, 3),
    "paged 64x64 w4 s3": Tile(64, 64, 4, 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", help="check only this variant (what the processes are started with)")
    arguments = parser.parse_args()
    if arguments.check is not None:
        return check(arguments.check)
    begun = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    passed = check_all([*GATHERED, *PAGED, "masks", "rope"])
    print(f"checks took {time.perf_counter() - begun:.0f} s\n", flush=True)
    time_attention(passed)
    time_rope()
    time_launches()
    print(f"\n{time.perf_counter() - begun:.0f} s in all")
    return 0


# Inputs


def attention_inputs(
    counts: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """q, k_cache, v_cache and the batch; blocks of 16 in random order."""
    size, n = 16, len(counts)
    blocks = [-(-context // size) for context in contexts]
    order = torch.randperm(sum(blocks), device="cuda", dtype=torch.int32)
    tables = torch.zeros(n, max(blocks), dtype=torch.int32, device="cuda")
    for row, part in enumerate(order.split(blocks)):
        tables[row, : len(part)] = part
    qkv = torch.randn(sum(counts), (heads + 2 * kv_heads) * dim, device="cuda", dtype=BF16)
    caches = torch.randn(2, sum(blocks), size, kv_heads, dim, device="cuda", dtype=BF16)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    batch = AttentionBatch(
        rows=torch.arange(n, dtype=torch.int32, device="cuda"),
        q_start=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        context=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        num_singles=0,
        max_query=max(counts),
        max_context=max(contexts),
        host_rows=list(range(n)),
        host_counts=counts,
        host_context=contexts,
    )
    return qkv[:, : heads * dim].view(-1, heads, dim), caches[0], caches[1], batch


def attend(variant: str, inputs: tuple[torch.Tensor, ...], mask: Mask = CAUSAL) -> Callable[[], torch.Tensor]:
    """A call of this variant on these inputs, with the lists that a step makes once already made."""
    q, k_cache, v_cache, batch = inputs
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    scale = q.shape[2] ** -0.5
    rules = attention_fresh.launch_shape, attention_fresh.LEAST_PAIRS, attention_prefill.prefill_tile
    batch.cache.clear()
    if variant in GATHERED:
        attention_fresh.launch_shape = lambda dim, device: GATHERED[variant]
        attention_fresh.LEAST_PAIRS = 1
    else:
        attention_fresh.LEAST_PAIRS = 1 << 60
        attention_prefill.prefill_tile = lambda *_: PAGED[variant]
    attention_prefill.prefill_attention(q, k_cache, v_cache, out, batch, mask, scale)
    attention_fresh.launch_shape, attention_fresh.LEAST_PAIRS, attention_prefill.prefill_tile = rules

    def call() -> torch.Tensor:
        attention_prefill.prefill_attention(q, k_cache, v_cache, out, batch, mask, scale)
        return out

    return call


# Checks


def check_all(names: list[str]) -> list[str]:
    command = [sys.executable, __file__, "--check"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = {name: subprocess.Popen([*command, name], **pipes) for name in names}
    passed = []
    end = time.perf_counter() + CHECK_SECONDS
    for name, process in processes.items():
        try:
            said, _ = process.communicate(timeout=max(1.0, end - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            said = "no end within the time limit"
        if process.returncode == 0:
            passed.append(name)
        tail = said.strip().splitlines()[-1:] or ["no output"]
        print(f"{'ok    ' if process.returncode == 0 else 'FAILED'} {name:26} {tail[0]}", flush=True)
    return passed


def check(name: str) -> int:
    torch.manual_seed(0)
    with torch.inference_mode():
        if name == "rope":
            error = max(rope_error(dim, rotated) for dim, rotated in ((128, 128), (96, 64)))
        elif name == "masks":
            cases = ((Mask(window=300), 128), (Mask(softcap=20.0), 128), (CAUSAL, 80), (CAUSAL, 256))
            error = max(attention_error("gathered 128x64 w8 s2", mask, dim, 32, 8) for mask, dim in cases)
        else:
            cases = ((128, 32, 8), (128, 16, 8), (64, 14, 2))  # the first two are timed afterwards
            error = max(attention_error(name, CAUSAL, dim, heads, kv_heads) for dim, heads, kv_heads in cases)
    print(f"largest error {error:.4f}")
    return int(not error < MOST_ERROR)


def attention_error(variant: str, mask: Mask, dim: int, heads: int, kv_heads: int) -> float:
    inputs = attention_inputs([1000, 300, 515, 33, 2], [1000, 1000, 515, 900, 65], heads, kv_heads, dim)
    got = attend(variant, inputs, mask)()
    q, k_cache, v_cache, batch = inputs
    wide = reference.attention(q.float(), k_cache.float(), v_cache.float(), batch, mask, dim**-0.5)
    # NaN must not pass, so it counts as the largest error there is.
    return torch.nan_to_num((got.float() - wide).abs(), nan=float("inf")).max().item()


def rope_error(dim: int, rotated: int) -> float:
    case = rope_case(70, heads=16, kv_heads=8, dim=dim, rotated=rotated, skipped=3, dtype=BF16, device="cuda")
    norms = {"q_norm": torch.rand(dim, device="cuda") + 0.5, "k_norm": torch.rand(dim, device="cuda"), "eps": 1e-6}
    wide = case.copy()
    wide.fused, wide.k_cache, wide.v_cache = wide.fused.float(), wide.k_cache.float(), wide.v_cache.float()
    expected = wide.call(partial(reference.rope_kv_write, **norms))
    got = case.copy().call(partial(rope.rope_kv_write, **norms))
    return max(((g.float() - e).abs() / (1 + e.abs())).max().item() for g, e in zip(got, expected, strict=True))


# Timings

SHAPES = {  # counts, contexts, heads, kv heads
    "llama3-8b  2 x 4096": ([4096] * 2, [4096] * 2, 32, 8),
    "qwen3-0.6b 2 x 4096": ([4096] * 2, [4096] * 2, 16, 8),
    "llama3-8b  8 x 1024": ([1024] * 8, [1024] * 8, 32, 8),
    "llama3-8b  4 x 1024 after 3072": ([1024] * 4, [4096] * 4, 32, 8),
    "llama3-8b  16 x 128 after 1024": ([128] * 16, [1152] * 16, 32, 8),
    "llama3-8b  ragged": (
        [37, 2011, 512, 1300, 777, 150, 3001, 404],
        [37, 2011, 512, 1300, 777, 150, 3001, 404],
        32,
        8,
    ),
}


@torch.inference_mode()
def time_attention(passed: list[str]) -> None:
    for shape, (counts, contexts, heads, kv_heads) in SHAPES.items():
        inputs = attention_inputs(counts, contexts, heads, kv_heads)
        pairs = sum(count * (context - count) + count * (count + 1) / 2 for count, context in zip(counts, contexts))
        flops = 4 * pairs * heads * 128
        best = []
        for variant in [name for name in passed if name in GATHERED or name in PAGED]:
            best.append((triton.testing.do_bench(attend(variant, inputs), warmup=5, rep=30), variant))
        if len(set(counts)) == 1 and counts == contexts:
            best += sdpa_times(len(counts), counts[0], heads, kv_heads)
        print(f"{shape}: prefill attention")
        for ms, variant in sorted(best):
            print(f"  {variant:26} {1e3 * ms:8.0f} us {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)


def sdpa_times(rows: int, length: int, heads: int, kv_heads: int) -> list[tuple[float, str]]:
    q, k, v = (torch.randn(rows, n, length, 128, device="cuda", dtype=BF16) for n in (heads, kv_heads, kv_heads))
    found = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
                begun = time.perf_counter()
                call()
                torch.cuda.synchronize()
                first = time.perf_counter() - begun
                name = f"SDPA {backend.name.split('_')[0].lower()} (first {1e3 * first:.0f} ms)"
                found.append((triton.testing.do_bench(call, warmup=5, rep=30), name))
        except RuntimeError as error:
            print(f"  SDPA {backend.name}: {str(error).splitlines()[0]}", flush=True)
    return found


@torch.inference_mode()
def time_rope() -> None:
    print("rope + KV write, qwen3-0.6b heads (16/8 x 128): separate norms / fused / no norms")
    weight = torch.ones(128, device="cuda", dtype=BF16)
    for tokens in (1, 64, 8192):
        case = rope_case(tokens, heads=16, kv_heads=8, dim=128, block_size=16, dtype=BF16, device="cuda")
        q = case.fused[:, :2048].view(tokens, 16, 128)
        k = case.fused[:, 2048:3072].view(tokens, 8, 128)
        v = case.fused[:, 3072:].view(tokens, 8, 128)
        rest = (case.cos_sin, case.positions, case.k_cache, case.v_cache, case.slots)

        def separate(q=q, k=k, v=v, rest=rest) -> None:
            rope.rope_kv_write(norm.rms_norm(q, weight, 1e-6), norm.rms_norm(k, weight, 1e-6), v, *rest)

        fused = partial(rope.rope_kv_write, q, k, v, *rest, weight, weight, 1e-6)
        plain = partial(rope.rope_kv_write, q, k, v, *rest)
        torch.cuda.synchronize()  # the timing runs on a stream of its own
        times = [1e3 * triton.testing.do_bench_cudagraph(call, rep=10) for call in (separate, fused, plain)]
        moved = tokens * 128 * 2 * (2 * 16 + 4 * 8)
        speed = moved / times[1] / 1e6
        print(
            f"  {tokens:5} tokens {times[0]:7.1f} / {times[1]:7.1f} / {times[2]:7.1f} us; fused {speed:.2f} TB/s",
            flush=True,
        )


@torch.inference_mode()
def time_launches() -> None:
    """Host time of a call that is not waited for."""
    print("host time per call")
    weight = torch.ones(1024, device="cuda", dtype=BF16)
    x, residual = torch.zeros(2, 8, 1024, device="cuda", dtype=BF16)
    case = rope_case(8, heads=16, kv_heads=8, dim=128, dtype=BF16, device="cuda")
    calls = {
        "add_rms_norm": lambda: norm.add_rms_norm(x, residual, weight, 1e-6),
        "rope_kv_write": partial(case.call, rope.rope_kv_write),
        "torch.add (for scale)": lambda: torch.add(x, residual),
        "paged attention": attend("paged 128x64 w8 s3", attention_inputs([8], [8], 16, 8)),
        "gathered attention (2 kernels)": attend("gathered 128x128 w8 s2", attention_inputs([8], [8], 16, 8)),
    }
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(300):
            call()
        spent = time.perf_counter() - begun
        torch.cuda.synchronize()
        print(f"  {name:30} {spent / 300 * 1e6:6.1f} us", flush=True)


if __name__ == "__main__":
    sys.exit(main())
