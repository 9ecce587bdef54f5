"""On a CUDA machine: check every Triton op against the reference, and time it against its floor.

    python scripts/gpu_ops_check.py            # check and time
    python scripts/gpu_ops_check.py --sweep    # also time other launch shapes of the attention kernels

The floor of an op is the larger of bytes / 4.25 TB/s and FLOPs / 790 TFLOP/s, as measured on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops")]

import triton.testing  # noqa: E402
from cases import attention_case, rope_case, sample_case, tolerance  # noqa: E402

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.triton import activation, norm, rope  # noqa: E402
from tokenmill.ops.triton.attention import decode as attention_decode  # noqa: E402
from tokenmill.ops.triton.attention import prefill as attention_prefill  # noqa: E402
from tokenmill.ops.triton.attention.paged import attention  # noqa: E402
from tokenmill.ops.triton.config import Tile  # noqa: E402
from tokenmill.ops.triton.sample import sampler as sample  # noqa: E402
from tokenmill.ops.types import CAUSAL, AttentionBatch, Mask, SampleBatch  # noqa: E402

BYTES_PER_S = 4.25e12
FLOPS_PER_S = 790e12
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also time other launch shapes of the attention kernels")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--jobs", type=int, default=8, help="processes for the checks, which mostly wait for compilers")
    parser.add_argument(
        "--part", type=int, help="run only this part of the checks (what the processes are started with)"
    )
    arguments = parser.parse_args()
    if arguments.part is not None:
        return run_checks(arguments.part, arguments.jobs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    failures = 0 if arguments.skip_checks else run_checks_in_processes(arguments.jobs)
    run_timings()
    if arguments.sweep:
        run_sweep()
    return int(failures > 0)


# Checks

Check = tuple[str, str, Callable[[], None]]  # which kernels it compiles, what it is, and the comparison


def run_checks_in_processes(jobs: int) -> int:
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--jobs", str(jobs), "--part"]
    processes = [subprocess.Popen([*command, str(part)]) for part in range(jobs)]
    failed = sum(process.wait() != 0 for process in processes)
    verdict = "all checks passed" if not failed else "some checks FAILED"
    print(f"{verdict} ({time.perf_counter() - begun:.0f} s)\n", flush=True)
    return failed


def run_checks(part: int, jobs: int) -> int:
    failures = total = 0
    kernels: dict[str, int] = {}
    for kernel, name, compare in itertools.chain(layer_checks(), rope_checks(), attention_checks(), sample_checks()):
        if kernels.setdefault(kernel, len(kernels)) % jobs != part:
            continue
        total += 1
        try:
            compare()
        except Exception as error:
            failures += 1
            reason = str(error).strip().replace("\n", " ")[:300]
            print(f"FAILED {name}: {type(error).__name__}: {reason}", flush=True)
    print(f"{total - failures} of {total} checks passed in part {part}", flush=True)
    return int(failures > 0)


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def layer_checks() -> Iterator[Check]:
    for dtype, shape in itertools.product(DTYPES, [(64, 4096), (3, 5120), (100, 8, 128), (77, 4, 80), (1, 1000)]):
        yield "norm", f"rms_norm {shape} {dtype}", partial(check_norm, shape, dtype)
        if len(shape) == 2:
            yield "norm", f"add_rms_norm {shape} {dtype}", partial(check_add_norm, shape, dtype)
    for dtype, kind in itertools.product(DTYPES, ("silu", "gelu_tanh")):
        yield "activation", f"act_mul {kind} {dtype}", partial(check_activation, kind, dtype)


def check_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), expected, **tolerance(dtype))


def check_add_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    expected_norm, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    normed, total = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0)
    torch.testing.assert_close(normed, expected_norm, **tolerance(dtype))


def check_activation(kind: str, dtype: torch.dtype) -> None:
    x = randn(33, 2 * 14336, dtype=dtype) * 4
    torch.testing.assert_close(activation.act_mul(x, kind), reference.act_mul(x, kind), **tolerance(dtype))


def rope_checks() -> Iterator[Check]:
    shapes: list[dict[str, Any]] = [
        {"heads": 32, "kv_heads": 8, "dim": 128},
        {"heads": 9, "kv_heads": 3, "dim": 64},
        {"heads": 32, "kv_heads": 32, "dim": 80, "rotated": 32},
        {"heads": 16, "kv_heads": 1, "dim": 576, "v_dim": 0, "rotated": 64},
        {"heads": 64, "kv_heads": 64, "dim": 128, "block_size": 64},
    ]
    for dtype, shape in itertools.product(DTYPES, shapes):
        yield "rope", f"rope_kv_write {shape} {dtype}", partial(check_rope, shape, dtype)


def check_rope(shape: dict[str, Any], dtype: torch.dtype) -> None:
    case = rope_case(37, skipped=5, dtype=dtype, device="cuda", **shape)
    for want, have in zip(case.copy().call(reference.rope_kv_write), case.copy().call(rope.rope_kv_write)):
        if want is not None:
            torch.testing.assert_close(have, want, **tolerance(dtype))


def attention_checks() -> Iterator[Check]:
    llama = {"heads": 32, "kv_heads": 8, "key_dim": 128, "block_size": 16}
    smol = {"heads": 9, "kv_heads": 3, "key_dim": 64, "block_size": 32}
    latent = {"key_dim": 576, "value_dim": 512, "kv_heads": 1, "values_in_keys": True}
    uneven = {"heads": 3, "kv_heads": 1, "key_dim": 24, "value_dim": 12}
    others: list[dict[str, Any]] = [
        smol,
        uneven,
        {"heads": 28, "kv_heads": 4, "key_dim": 128, "block_size": 64},
        {"heads": 4, "kv_heads": 4, "key_dim": 80},
        {"heads": 4, "kv_heads": 4, "key_dim": 96, "block_size": 16},
        {"heads": 8, "kv_heads": 4, "key_dim": 256, "block_size": 16},
        {"heads": 16, "block_size": 16, **latent},
        {"heads": 128, "block_size": 64, **latent},
    ]
    masks = [CAUSAL, Mask(window=50), Mask(window=130), Mask(softcap=30.0), Mask(window=200, softcap=20.0)]
    wanted = [(torch.bfloat16, llama, mask) for mask in masks]
    wanted += [(torch.bfloat16, shape, mask) for shape in others for mask in masks[:2]]
    wanted += [(torch.float16, shape, CAUSAL) for shape in (llama, others[-1])]
    wanted += [(torch.float32, shape, mask) for shape in (llama, smol, uneven) for mask in masks[:2]]
    mixes = [
        ([1] * 5, [1, 17, 64, 300, 999]),
        ([1, 1, 3, 40, 200], [700, 5, 3, 333, 450]),
        ([2, 5], [2, 600]),
    ]
    for (dtype, shape, mask), (counts, contexts) in itertools.product(wanted, mixes):
        kernel = f"attention {shape} {mask} {dtype}"
        compare = partial(check_attention, counts, contexts, mask, shape, dtype)
        yield kernel, f"{kernel} {counts} of {contexts}", compare


def check_attention(
    counts: list[int], contexts: list[int], mask: Mask, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    case = attention_case(counts, contexts, mask=mask, dtype=dtype, device="cuda", shared=1, **shape)
    got = case.call(attention)
    assert not got.isnan().any(), "NaN leaked"
    torch.testing.assert_close(got, case.call(reference.attention), **tolerance(dtype))


def sample_checks() -> Iterator[Check]:
    filters: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 10000},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
        {"top_k": 100, "top_p": 0.5, "min_p": 0.01, "temperature": 1.5},
    ]
    for vocab, spread, settings in itertools.product((151936, 50257), (0.2, 3.0), filters):
        yield f"sample {vocab}", f"sample {vocab} {spread} {settings}", partial(check_sample, vocab, spread, settings)


def check_sample(vocab: int, spread: float, settings: dict[str, Any]) -> None:
    logits, batch = sample_case(128, vocab, spread=spread, device="cuda", **settings)
    got, expected = sample.sample(logits, batch), reference.sample(logits, batch)
    differ = (got != expected).nonzero().flatten().tolist()
    wrong = [row for row in differ if not close_call(logits, batch, row, got)][:5]
    assert not wrong, f"rows {wrong}: {got[wrong].tolist()} instead of {expected[wrong].tolist()}"


def close_call(logits: torch.Tensor, batch: SampleBatch, row: int, got: torch.Tensor) -> bool:
    """Whether rounding explains another token: a gap below 1e-5, or the edge of the nucleus within 1e-4."""
    one = {name: v[row : row + 1] if isinstance(v, torch.Tensor) else v for name, v in vars(batch).items()}
    values = logits[row : row + 1].double()
    noise = reference.gumbel_noise(one["seed"], one["position"], logits.shape[1]).double()
    noisy = (values / one["temperature"].double().clamp_min(1e-5) + noise)[0]
    for nudge in (0.9999, 1.0, 1.0001):
        one["top_p"] = (batch.top_p[row : row + 1].double() * nudge).clamp(max=1.0)
        best = reference.sample(values, SampleBatch(**one))[0]
        if best == got[row] or abs(noisy[best] - noisy[got[row]]) < 1e-5:
            return True
    return False


# Timings


def report(name: str, call: Callable[[], Any], moved: float, flops: float = 0.0) -> None:
    """Time replays of a graph, so that what the host costs does not count."""
    try:
        call()
        torch.cuda.synchronize()  # the timing runs on a stream of its own
        seconds = triton.testing.do_bench_cudagraph(call, rep=30) * 1e-3
    except Exception as error:
        print(f"{name:<66} failed: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return
    floor = max(moved / BYTES_PER_S, flops / FLOPS_PER_S)
    bound_by_math = flops / FLOPS_PER_S > moved / BYTES_PER_S
    rate = f"{flops / seconds / 1e12:6.0f} TFLOP/s" if bound_by_math else f"{moved / seconds / 1e12:6.2f} TB/s"
    figures = f"{seconds * 1e6:9.1f} us  floor {floor * 1e6:8.1f} us  {floor / seconds:5.0%}"
    print(f"{name:<66} {figures}  {rate}", flush=True)


def run_timings() -> None:
    layer_timings()
    for rows, context in ((1, 1024), (1, 16384), (64, 1024), (256, 1024), (64, 4096)):
        decode_timing("decode 32/8 heads x 128", rows, context, 32, 8)
    decode_timing("decode 16/8 heads x 128", 64, 1024, 16, 8)
    decode_timing("decode 9/3 heads x 64", 64, 1024, 9, 3, dim=64)
    decode_timing("decode 8/4 heads x 256", 64, 1024, 8, 4, dim=256)
    decode_timing("decode MLA 16 heads", 64, 4096, 16, 1, dim=576, value_dim=512)
    decode_timing("decode MLA 128 heads", 64, 4096, 128, 1, dim=576, value_dim=512)
    decode_timing("decode 32/8 heads x 128, window 512", 64, 4096, 32, 8, mask=Mask(window=512))
    for count, context in ((4096, 4096), (1024, 4096), (512, 512)):
        prefill_timing("prefill 32/8 heads x 128", 4, count, context, 32, 8)
    prefill_timing("prefill 16/8 heads x 128", 16, 4096, 4096, 16, 8)
    prefill_timing("prefill 9/3 heads x 64", 4, 4096, 4096, 9, 3, dim=64)
    prefill_timing("prefill 8/4 heads x 256", 4, 4096, 4096, 8, 4, dim=256)
    prefill_timing("prefill MLA 16 heads", 1, 4096, 4096, 16, 1, dim=576, value_dim=512)
    prefill_timing("verify 5 tokens, 32/8 heads x 128", 64, 5, 1024, 32, 8)
    sample_timings()


def layer_timings() -> None:
    for tokens in (64, 8192):
        x, residual, weight, head_weight = randn(tokens, 4096), randn(tokens, 4096), randn(4096), randn(128)
        heads = randn(tokens, 48 * 128)[:, : 32 * 128].view(tokens, 32, 128)
        gate_up = randn(tokens, 2 * 14336)
        case = rope_case(tokens, heads=32, kv_heads=8, dim=128, block_size=16, dtype=BF16, device="cuda")
        written = 2 * tokens * (2 * 32 + 4 * 8) * 128
        report(f"rms_norm {tokens} x 4096", partial(norm.rms_norm, x, weight, 1e-6), 4 * x.numel())
        report(f"add_rms_norm {tokens} x 4096", partial(norm.add_rms_norm, x, residual, weight, 1e-6), 8 * x.numel())
        report(f"rms_norm {tokens} x 32 x 128", partial(norm.rms_norm, heads, head_weight, 1e-6), 4 * heads.numel())
        report(f"act_mul silu {tokens} x 14336", partial(activation.act_mul, gate_up, "silu"), 3 * gate_up.numel())
        report(f"rope_kv_write {tokens} x 32/8 x 128", partial(case.call, rope.rope_kv_write), written)


def big_batch(
    rows: int, count: int, context: int, heads: int, kv_heads: int, dim: int, value_dim: int, block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Random keys everywhere, blocks in random order."""
    blocks = -(-context // block_size)
    k_cache = randn(rows * blocks, block_size, kv_heads, dim)
    v_cache = k_cache[..., dim - value_dim :] if value_dim != dim else randn(rows * blocks, block_size, kv_heads, dim)
    batch = AttentionBatch(
        rows=torch.arange(rows, dtype=torch.int32, device="cuda"),
        q_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda") * count,
        context=torch.full((rows,), context, dtype=torch.int32, device="cuda"),
        block_tables=torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int(),
        num_singles=rows if count == 1 else 0,
        max_query=count,
        max_context=context,
        host_rows=list(range(rows)),
        host_counts=[count] * rows,
        host_context=[context] * rows,
    )
    return randn(rows * count, heads, dim), k_cache, v_cache, batch


def decode_timing(
    name: str,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    dim: int = 128,
    value_dim: int = 0,
    mask: Mask = CAUSAL,
) -> None:
    args = big_batch(rows, 1, context, heads, kv_heads, dim, value_dim or dim)
    seen = context if mask.window is None else min(context, mask.window)
    per_token = dim if value_dim else 2 * dim
    flops = 2 * rows * heads * seen * (dim + (value_dim or dim))
    name = f"{name}: {rows} rows of {context}"
    report(name, lambda: attention(*args, mask, dim**-0.5), 2 * rows * seen * kv_heads * per_token, flops)


def prefill_timing(
    name: str, rows: int, count: int, context: int, heads: int, kv_heads: int, dim: int = 128, value_dim: int = 0
) -> None:
    args = big_batch(rows, count, context, heads, kv_heads, dim, value_dim or dim)
    seen = sum(range(context - count + 1, context + 1))
    flops = 2 * rows * heads * seen * (dim + (value_dim or dim))
    moved = 2 * rows * (kv_heads * context + heads * count) * 2 * dim
    report(f"{name}: {rows} x {count} of {context}", lambda: attention(*args, CAUSAL, dim**-0.5), moved, flops)


def sample_timings() -> None:
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "top_k 20, top_p 0.9": {"top_k": 20, "top_p": 0.9},
        "top_p 0.9": {"top_p": 0.9},
        "min_p 0.05": {"min_p": 0.05},
    }
    for rows, (name, values) in itertools.product((1, 64, 256), settings.items()):
        logits, batch = sample_case(rows, 151936, device="cuda", **values)
        report(f"sample {name}: {rows} x 151936", partial(sample.sample, logits, batch), 4 * logits.numel())


def run_sweep() -> None:
    print("\nother launch shapes: (queries, keys, warps, stages)")
    shapes = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5))
    rule = attention_prefill.prefill_tile
    for shape in (shape for shape in shapes if shape[0] == 128 or shape[2] == 4):
        attention_prefill.prefill_tile = lambda *_, shape=shape: Tile(*shape)
        prefill_timing(f"prefill {shape}", 4, 4096, 4096, 32, 8)
    attention_prefill.prefill_tile = rule
    rule = attention_decode.decode_tile
    for shape in itertools.product((16,), (32, 64, 128), (2, 4, 8), (3, 5, 7)):
        attention_decode.decode_tile = lambda *_, shape=shape: Tile(*shape)
        decode_timing(f"decode {shape}", 64, 1024, 32, 8)
    attention_decode.decode_tile = rule
    split_rule = attention_decode.decode_splits
    for splits in (1, 2, 3, 4, 6, 8):
        attention_decode.decode_splits = lambda *_, splits=splits: (splits, 1)
        decode_timing(f"decode with {splits} splits", 64, 1024, 32, 8)
    attention_decode.decode_splits = split_rule


if __name__ == "__main__":
    sys.exit(main())
