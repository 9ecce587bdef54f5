"""On a CUDA machine: check that invariant kernels give a row the same bits in any batch, and time them.

    python scripts/gpu_invariant.py            # check and time
    python scripts/gpu_invariant.py check      # only check
    python scripts/gpu_invariant.py mix        # the offline mix of llama3-8b with and without the mode (two minutes)

Times are of CUDA graphs with weights and keys rotated through more memory than the cache holds. The floor is the larger
of bytes / 4.25 TB/s and FLOPs / 790 TFLOP/s, as on an H200.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops"), str(ROOT / "scripts")]

import triton.testing  # noqa: E402
from cases import attention_case  # noqa: E402

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.triton.attention import invariant  # noqa: E402
from tokenmill.ops.triton.attention.paged import attention as plain_attention  # noqa: E402
from tokenmill.ops.triton.config import Tile  # noqa: E402
from tokenmill.ops.triton.gemm.invariant import Shape, choose_shape, invariant_gemm  # noqa: E402
from tokenmill.ops.types import CAUSAL, AttentionBatch  # noqa: E402

BYTES_PER_S, FLOPS_PER_S = 4.25e12, 790e12
BF16 = torch.bfloat16
LLAMA = {"gate_up": (4096, 28672), "down": (14336, 4096), "qkv": (4096, 6144), "o": (4096, 4096)}
BEGUN = time.perf_counter()
TABLE: list[str] = []


def main() -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    torch.manual_seed(0)
    if sys.argv[1:2] == ["mix"]:
        return int(not guarded(time_mix))
    failures = sum(not guarded(check) for check in (check_products, check_attention))
    guarded(compare_instructions)
    if sys.argv[1:] != ["check"]:
        guarded(time_products)
        guarded(time_attention)
    print("\n" + "\n".join([f"{failures} checks FAILED" if failures else "all checks passed", *TABLE]), flush=True)
    return int(failures > 0)


def say(line: str, keep: bool = True) -> None:
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)
    if keep:
        TABLE.append(line)


def guarded(part: Callable[[], bool | None]) -> bool:
    try:
        return part() is not False
    except Exception as problem:
        say(f"FAILED {part.__name__}: {type(problem).__name__}: {str(problem)[:400]}")
        return False


# Products


def check_products() -> bool:
    """Rows of 8192, of every tile height and at random places of smaller batches: the same bits."""
    good = True
    for name, (inner, columns) in {"down": (14336, 1024), "qkv": (4096, 6144), "odd": (1032, 777)}.items():
        x = torch.randn(8192, inner, device="cuda", dtype=BF16)
        weight = torch.randn(columns, inner, device="cuda", dtype=BF16) * inner**-0.5
        whole = invariant_gemm(x, weight)
        exact = x[:64].double() @ weight.double().T
        error = ((whole[:64] - exact).abs().max() / exact.abs().max()).item()
        wrong = []
        for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1000):
            for _ in range(3):
                pick = torch.randint(0, 8192, (rows,), device="cuda")
                if not torch.equal(invariant_gemm(x[pick], weight), whole[pick]):
                    wrong.append(rows)
        one_by_one = torch.cat([invariant_gemm(x[i : i + 1], weight) for i in range(256)])
        same = not wrong and torch.equal(one_by_one, whole[:256]) and error < 1e-2
        good &= same
        say(f"{'ok    ' if same else 'FAILED'} product {name}: error {error:.1e}, batches with other bits {wrong}")
    return good


def compare_instructions() -> None:
    """Which tiles agree bit for bit: says how free the rule for launch shapes may be."""
    x = torch.randn(512, 4096, device="cuda", dtype=BF16)
    weight = torch.randn(2048, 4096, device="cuda", dtype=BF16) / 64
    base = invariant_gemm(x, weight, shape=Shape(64, 64, 128, 4, 4))
    for name, shape in {
        "n16": Shape(16, 64, 128, 4, 4),
        "n256": Shape(256, 64, 64, 4, 3),
        "128 left": Shape(64, 128, 64, 8, 3),
        "rows left": Shape(128, 128, 64, 8, 3, rows_left=True),
        "step 32": Shape(64, 64, 32, 4, 4),
        "mma.sync": Shape(64, 32, 64, 4, 3),
        "mma.sync, rows left": Shape(32, 64, 64, 4, 3, rows_left=True),
        "library": None,
    }.items():
        other = F.linear(x, weight) if shape is None else invariant_gemm(x, weight, shape=shape)
        say(f"m64n64k16 and {name}: {(other == base).float().mean().item():.4%} of elements equal")


def time_products() -> None:
    for rows in (1, 16, 64, 128, 256, 8192):
        ours_all = library_all = 0.0
        for name, (inner, columns) in LLAMA.items():
            flops = 2.0 * rows * inner * columns
            moved = 2.0 * (inner * columns + rows * (inner + columns))
            floor = max(moved / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6
            copies = max(1, min(6, int(300e6 / (2 * inner * columns))))
            weights = [torch.randn(columns, inner, device="cuda", dtype=BF16) for _ in range(copies)]
            x = torch.randn(rows, inner, device="cuda", dtype=BF16)
            library = each_us(F.linear, x, weights)
            found = []
            for shape in candidates(rows, columns, inner):
                try:
                    found.append((each_us(partial(invariant_gemm, shape=shape), x, weights), shape))
                except Exception as problem:
                    say(f"{shape}: {type(problem).__name__}: {str(problem)[:120]}", keep=False)
            found.sort(key=lambda one: one[0])
            rule = next(
                (taken for taken, shape in found if shape == choose_shape(rows, columns, inner, BF16)), float("nan")
            )
            ours_all, library_all = ours_all + rule, library_all + library
            best, shape = found[0]
            say(
                f"M={rows:<5} {name:<8} floor {floor:6.1f}  library {library:6.1f}  rule {rule:6.1f}  best {best:6.1f} "
                f"us ({library / best:4.0%}, {flops / best / 1e6:4.0f} TFLOP/s, {moved / best / 1e6:4.2f} TB/s)"
                f"  m{shape.block_m} n{shape.block_n} k{shape.block_k} w{shape.num_warps} s{shape.num_stages}"
                f" {'rows left' if shape.rows_left else ''} x{shape.programs} g{shape.group}"
            )
        say(f"M={rows:<5} a layer: library {library_all:.1f}, rule {ours_all:.1f} us: {library_all / ours_all:.0%}")


def candidates(rows: int, columns: int, inner: int) -> list[Shape]:
    """The rule's shape first, and a few that may be better."""
    rule = choose_shape(rows, columns, inner, BF16)
    if rows <= 16:
        others = [Shape(16, 64, 128, 4, 4, programs=2), Shape(16, 64, 256, 4, 4), Shape(16, 128, 128, 4, 5)]
    elif rows <= 64:
        others = [Shape(64, 64, 128, 4, 6), Shape(64, 64, 128, 4, 3, programs=2), Shape(64, 128, 64, 4, 4, programs=2),
                  Shape(64, 128, 128, 8, 4)]  # fmt: skip
    elif rows <= 256:
        others = [Shape(128, 64, 128, 4, 4), Shape(64, 64, 128, 4, 6), Shape(128, 128, 64, 8, 6),
                  Shape(64, 128, 64, 4, 6), Shape(256, 64, 64, 4, 5), Shape(256, 128, 64, 8, 4)]  # fmt: skip
    else:
        others = [replace(rule, num_stages=3), replace(rule, group=16), Shape(256, 128, 64, 8, 4),
                  Shape(256, 128, 64, 8, 4, rows_left=True)]  # fmt: skip
    return [rule] + [shape for shape in others if shape != rule]


def each_us(product: Callable[..., torch.Tensor], x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    return us(lambda: [product(x, weight) for weight in weights]) / len(weights)


def us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()  # the timing runs on a stream of its own
    return float(triton.testing.do_bench_cudagraph(call, rep=8)) * 1e3


# Attention


def check_attention() -> bool:
    """A long row with a chunk at its end, the same queries in other chunks and one by one: the same bits."""
    good = True
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128), (8, 4, 64), (8, 4, 256)):
        case = attention_case([150, 300], [1900, 300], heads=heads, kv_heads=kv_heads, key_dim=dim, block_size=16,
                              dtype=BF16, device="cuda")  # fmt: skip
        whole = case.call(invariant.attention)
        wide = replace(case, q=case.q.float(), k_cache=case.k_cache.float(), v_cache=case.v_cache.float())
        error = (whole.float() - wide.call(reference.attention)).abs().max().item()
        wrong = []
        for step in (1, 2, 7, 31, 64):
            parts = []
            for row, (first, count, context) in enumerate(((0, 150, 1900), (150, 300, 300))):
                for at in range(0, count, step):
                    size = min(step, count - at)
                    parts.append((row, first + at, size, context - count + at + size))
            parts.sort(key=lambda part: part[2] > 1)
            found = torch.empty_like(whole)
            batch = batch_of(case.batch, parts)
            order = torch.cat([torch.arange(first, first + size) for _, first, size, _ in parts]).cuda()
            got = replace(case, q=case.q[order].contiguous(), batch=batch).call(invariant.attention)
            found[order] = got
            if not torch.equal(found, whole):
                wrong.append(f"chunks of {step}: {(found == whole).float().mean().item():.2%} equal")
        alone = [
            replace(case, q=case.q[part[1] : part[1] + 1].contiguous(), batch=batch_of(case.batch, [part]))
            for part in ((0, 149, 1, 1900), (1, 200, 1, 51))
        ]
        for one, at in zip(alone, (149, 200), strict=True):
            if not torch.equal(one.call(invariant.attention)[0], whole[at]):
                wrong.append(f"query {at} alone")
        fine = not wrong and error < 2e-2
        say(f"{'ok    ' if fine else 'FAILED'} attention {heads}/{kv_heads} x {dim}: error {error:.1e} {wrong}")
        good &= fine
    return good


def batch_of(batch: AttentionBatch, parts: list[tuple[int, int, int, int]]) -> AttentionBatch:
    """Each part (row, first token, count, context) as a row of its own."""
    rows = [batch.host_rows[row] for row, _, _, _ in parts]
    counts, contexts = [part[2] for part in parts], [part[3] for part in parts]
    return AttentionBatch(
        rows=torch.tensor(rows, dtype=torch.int32).cuda(),
        q_start=torch.tensor([0, *counts]).cumsum(0).int().cuda(),
        context=torch.tensor(contexts, dtype=torch.int32).cuda(),
        block_tables=batch.block_tables,
        num_singles=sum(count == 1 for count in counts),
        max_query=max(counts),
        max_context=max(contexts),
        host_rows=rows,
        host_counts=counts,
        host_context=contexts,
    )


@dataclass
class Load:
    """Some layers of llama3-8b's attention, enough that no layer finds its keys in the cache of the one before."""

    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    batch: AttentionBatch

    def run(self, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        for k_cache, v_cache in self.caches:
            out = attention(self.q, k_cache, v_cache, self.batch, CAUSAL, 128**-0.5)
        return out

    def us(self, attention: Callable[..., torch.Tensor]) -> float:
        """Microseconds per layer; the plan of the step is not counted."""
        self.batch.cache.clear()
        self.run(attention)
        return us(partial(self.run, attention)) / len(self.caches)


def load(counts: list[int], contexts: list[int]) -> Load:
    blocks = [-(-context // 16) for context in contexts]
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in enumerate(order.split(blocks)):
        tables[row, : len(part)] = part
    tables = tables.cuda()
    blank = AttentionBatch(tables, tables, tables, tables, 0, 0, 0, list(range(len(blocks))), [], [])
    batch = batch_of(blank, [(i, 0, *one) for i, one in enumerate(zip(counts, contexts, strict=True))])
    layers = min(8, max(2, int(200e6 / (4096 * sum(contexts)))))
    caches = [torch.randn(2, len(order), 16, 8, 128, device="cuda", dtype=BF16).unbind() for _ in range(layers)]
    return Load(torch.randn(sum(counts), 32, 128, device="cuda", dtype=BF16), caches, batch)


DECODES = {
    "1 x 300": [300],
    "1 x 8192": [8192],
    "64 x 1000": [1000] * 64,
    "256 x 650": [650] * 256,
    "256 ragged 100-2000": [100 + (k * 977) % 1900 for k in range(256)],
}
DECODE_TILES = Tile(16, 64, 4, 5), Tile(16, 64, 4, 4), Tile(16, 64, 2, 5)
CHUNK_TILES = Tile(32, 64, 4, 3), Tile(32, 64, 8, 3), Tile(32, 64, 2, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)


def time_attention() -> None:
    for name, contexts in DECODES.items():
        work = load([1] * len(contexts), contexts)
        floor = 4096 * sum(contexts) / BYTES_PER_S * 1e6
        line = f"decode {name:<20} floor {floor:6.1f}  plain {work.us(plain_attention):6.1f}"
        say(line + "".join(try_tile(work, tile)[0] for tile in DECODE_TILES) + " us")
    for tokens, rows in ((4096, 2), (1024, 8)):
        work = load([tokens] * rows, [tokens] * rows)
        flops = 2.0 * rows * tokens * tokens * 32 * 128
        line = f"prompts {rows} x {tokens}: plain {flops / work.us(plain_attention) / 1e6:4.0f} TFLOP/s"
        first = None
        for tile in CHUNK_TILES:
            taken, got = try_tile(work, tile, flops)
            first = got if first is None else first
            line += taken + ("" if got is None or torch.equal(first, got) else " (other bits)")
        say(line)


def try_tile(work: Load, tile: Tile, flops: float | None = None) -> tuple[str, torch.Tensor | None]:
    """The time (or rate) with this tile, and the result."""
    rule = invariant._tile
    invariant._tile = lambda *_: tile
    try:
        taken = work.us(invariant.attention)
        figure = f"{taken:6.1f}" if flops is None else f"{flops / taken / 1e6:4.0f}"
        return f"  m{tile.block_m} w{tile.num_warps} s{tile.num_stages} {figure}", work.run(invariant.attention)
    except Exception as problem:
        return f"  m{tile.block_m} w{tile.num_warps} {type(problem).__name__}", None
    finally:
        invariant._tile = rule


# The whole engine


def time_mix() -> bool:
    """256 requests of 100 to 1024 tokens in and out; then some of them alone, which must give the same tokens."""
    from h200_workloads import _COMMON, SHAPES, mixed

    from tokenmill import LLM, SamplingParams

    work = mixed(256)
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n, detokenize=False) for _, n in work]
    taken, same = {}, True
    for mode in (True,) if "--only-invariant" in sys.argv else (False, True):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(_COMMON | SHAPES["llama3-8b"]))
            llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=512,
                      batch_invariant=mode)  # fmt: skip
        for _ in range(2):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
            taken[mode] = min(taken.get(mode, float("inf")), time.perf_counter() - start)
        say(f"offline mix, batch_invariant={mode}: {taken[mode]:.2f} s")
        if mode:
            for number in (0, 64, 100, 128):
                llm.reset_prefix_cache()
                alone = llm.generate([work[number][0]], params[number], use_tqdm=False)[0].outputs[0]
                same &= alone.token_ids == outputs[number].outputs[0].token_ids
            say(f"requests alone and in the mix: {'the same tokens' if same else 'OTHER tokens'}")
        llm.shutdown()
        del llm
        torch.cuda.empty_cache()
    if False in taken:
        say(f"the mode costs {taken[True] / taken[False] - 1:.1%} of the time")
    return same


if __name__ == "__main__":
    sys.exit(main())
