"""On a CUDA machine: check quantized KV caches against the reference in float64, and time attention over them.

    python scripts/gpu_kv.py                 # check, time against bfloat16, try other launch shapes
    python scripts/gpu_kv.py --only decode   # rows with one query only: checks, times and launch shapes, in a minute

Bytes are those of the codes and scales that are really read; a plain read of an H200 reaches 4.25 TB/s.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ops")]

import triton.testing  # noqa: E402
from cases import AttentionCase, attention_case, rope_case  # noqa: E402

from tokenmill.ops import reference  # noqa: E402
from tokenmill.ops.kv_forms import KV_FORMS, KVScales, dequantize, quantize  # noqa: E402
from tokenmill.ops.triton import config  # noqa: E402
from tokenmill.ops.triton.attention import decode as attention_decode  # noqa: E402
from tokenmill.ops.triton.attention.paged import attention  # noqa: E402
from tokenmill.ops.triton.config import Tile  # noqa: E402
from tokenmill.ops.triton.rope import rope_kv_write  # noqa: E402
from tokenmill.ops.types import CAUSAL, AttentionBatch, Mask  # noqa: E402

BF16 = torch.bfloat16
FORMS = tuple(KV_FORMS)
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16  # of llama3-8b
TILES = (Tile(4, 32, 1, 5), Tile(4, 32, 1, 4), Tile(4, 64, 1, 4), Tile(4, 32, 1, 6))
LONE_WARPS = (1, 2, 4)  # how many more parts than of programs of several warps
BEGUN = time.perf_counter()
TABLE: list[str] = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("decode", "prefill"), help="leave out what does not concern these rows")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))  # an exception ends a compiler under way, too
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    wanted = [one for one in checks() if only is None or (only == "decode") == one[0].startswith("decode")]
    failures = sum(not check(form, *one) for one in wanted for form in FORMS)
    if only is None:
        failures += sum(not check_write(form) for form in FORMS)
    if only != "prefill":
        time_decode()
    if only != "decode":
        time_prefill()
    print("\n" + "\n".join([f"{failures} checks FAILED" if failures else "all checks passed", *TABLE]), flush=True)
    return int(failures > 0)


def say(line: str, keep: bool = True) -> None:
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)
    if keep:
        TABLE.append(line)


# Checks


def checks() -> list[tuple[str, AttentionCase]]:
    case = partial(attention_case, device="cuda", dtype=BF16, block_size=16)
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "key_dim": 128}
    small: dict[str, Any] = {"heads": 16, "kv_heads": 2, "key_dim": 64}
    ragged = [900, 700, 5, 2500, 701, 1300]
    return [
        ("decode, 4 heads of 128 per kv head", case([1] * 6, ragged, **llama)),
        ("decode, 8 heads of 64 per kv head, window", case([1] * 6, ragged, mask=Mask(window=500), **small)),
        ("short chunks, soft cap", case([1, 7, 40], [300, 200, 500], mask=Mask(softcap=30.0), **llama)),
        ("long chunks, gathered", case([1, 300, 500], [300, 900, 500], **llama)),
        ("long chunks, heads of 64, window", case([300, 257], [900, 257], mask=Mask(window=100), **small)),
        ("shared prefix", share(case([1] * 6, ragged, shared=41, **llama), 656, [5, 0, 1, 4, 3])),
    ]


def share(case: AttentionCase, tokens: int, members: list[int]) -> AttentionCase:
    lengths = torch.zeros(len(case.batch.host_rows), dtype=torch.int32)
    lengths[members] = tokens
    case.batch.shared_tokens = lengths.cuda()
    case.batch.shared_members = torch.tensor(members, dtype=torch.int32).cuda()
    return case


def check(form: str, name: str, case: AttentionCase) -> bool:
    try:
        case = replace(case, batch=replace(case.batch, cache={}))
        k_codes, k_scales = quantize(case.k_cache, KV_FORMS[form])
        v_codes, v_scales = quantize(case.v_cache, KV_FORMS[form])
        exact = replace(
            case,
            q=case.q.double(),
            k_cache=dequantize(k_codes, k_scales, torch.float64),
            v_cache=dequantize(v_codes, v_scales, torch.float64),
        ).call(reference.attention)
        coded, scales = replace(case, k_cache=k_codes, v_cache=v_codes), KVScales(k_scales, v_scales)
        got = coded.call(partial(attention, scales=scales))
        error = (got.double() - exact).abs().max().item()
        same = all(torch.equal(coded.call(partial(attention, scales=scales)), got) for _ in range(20))
        good = error < 2e-2 and same  # NaN is not below
        say(f"{'ok    ' if good else 'FAILED'} {form:<4} {name}: error {error:.1e}, stable {same}")
        return good
    except Exception as problem:
        say(f"FAILED {form} {name}: {type(problem).__name__}: {str(problem)[:300]}")
        return False


def check_write(form: str) -> bool:
    """Codes and scales as the reference writes them, up to a rotation that is rounded differently."""
    try:
        kind = KV_FORMS[form]
        case = rope_case(300, heads=32, kv_heads=8, dim=128, block_size=16, dtype=BF16, device="cuda")
        found = []
        for fn in (rope_kv_write, reference.rope_kv_write):
            shape = case.k_cache.shape[:3]
            codes = [torch.zeros(*shape, kind.width(128), dtype=torch.uint8, device="cuda") for _ in "kv"]
            scales = [torch.zeros(*shape, kind.scales(128), dtype=BF16, device="cuda") for _ in "kv"]
            mine = replace(case.copy(), k_cache=codes[0].view(kind.dtype), v_cache=codes[1].view(kind.dtype))
            mine.call(partial(fn, scales=KVScales(*scales)))
            found.append((*codes, *scales))
        differ = [(a != b).float().mean().item() for a, b in zip(*found, strict=True)]
        good = differ[1] == differ[3] == 0.0 and differ[0] < 1e-3 and differ[2] < 1e-2
        say(f"{'ok    ' if good else 'FAILED'} {form:<4} written: differ k {differ[0]:.1e} v {differ[1]:.1e} of codes, "
            f"k {differ[2]:.1e} v {differ[3]:.1e} of scales")  # fmt: skip
        return good
    except Exception as problem:
        say(f"FAILED {form} written: {type(problem).__name__}: {str(problem)[:300]}")
        return False


# Timings


@dataclass
class Load:
    """Some layers of attention, enough that no layer finds its keys in the cache of the one before."""

    q: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor, KVScales | None]]
    batch: AttentionBatch
    moved: float  # bytes per layer

    def run(self) -> None:
        for k_cache, v_cache, scales in self.layers:
            attention(self.q, k_cache, v_cache, self.batch, CAUSAL, DIM**-0.5, scales)

    def us(self) -> float:
        """Microseconds per layer; the plan of the step is not counted."""
        self.batch.cache.clear()
        self.run()
        torch.cuda.synchronize()  # the timing runs on a stream of its own
        return float(triton.testing.do_bench_cudagraph(self.run, rep=15)) * 1e3 / len(self.layers)


def load(form: str, counts: list[int], contexts: list[int]) -> Load:
    rows, tokens = len(counts), sum(counts)
    blocks = [-(-context // BLOCK) for context in contexts]
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    tables = torch.zeros(rows, max(blocks), dtype=torch.int32)
    for row, (own, end) in enumerate(zip(blocks, torch.tensor(blocks).cumsum(0).tolist(), strict=True)):
        tables[row, :own] = order[end - own : end]
    head_bytes = KV_FORMS[form].head_bytes(DIM) if form in KV_FORMS else 2 * DIM
    moved = 2.0 * sum(contexts) * KV_HEADS * head_bytes
    layers = [cache(form, len(order)) for _ in range(min(8, max(2, int(200e6 / moved))))]
    starts = torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32)
    batch = AttentionBatch(
        rows=torch.arange(rows, dtype=torch.int32, device="cuda"),
        q_start=starts,
        context=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        block_tables=tables.cuda(),
        num_singles=sum(count == 1 for count in counts),
        max_query=max(counts),
        max_context=max(contexts),
        host_rows=list(range(rows)),
        host_counts=counts,
        host_context=contexts,
    )
    return Load(torch.randn(tokens, HEADS, DIM, device="cuda", dtype=BF16), layers, batch, moved)


def cache(form: str, blocks: int) -> tuple[torch.Tensor, torch.Tensor, KVScales | None]:
    shape = (blocks, BLOCK, KV_HEADS)
    if form not in KV_FORMS:
        keys, values = torch.randn(2, *shape, DIM, device="cuda", dtype=BF16)
        return keys, values, None
    kind, parts = KV_FORMS[form], []
    for _ in "kv":
        # Bytes of no float8 that is not a number; any scales will do.
        codes = torch.randint(0, 120, (*shape, kind.width(DIM)), device="cuda", dtype=torch.uint8)
        scales = torch.rand(*shape, kind.scales(DIM), device="cuda").to(BF16) * 0.01 + 0.01
        parts.append((codes.view(kind.dtype), scales))
    (k_codes, k_scales), (v_codes, v_scales) = parts
    return k_codes, v_codes, KVScales(k_scales, v_scales)


def time_decode() -> None:
    ragged = torch.randint(600, 1400, (256,), generator=torch.Generator().manual_seed(1)).tolist()
    for name, contexts in (
        ("256 x 1024", [1024] * 256),
        ("512 x 1200", [1200] * 512),
        ("256 x 600-1400", ragged),
        (" 64 x 1024", [1024] * 64),
        (" 16 x 8192", [8192] * 16),
        ("  1 x 8192", [8192]),
    ):
        plain = 0.0
        for form in ("bf16", *FORMS):
            work = load(form, [1] * len(contexts), contexts)
            us = work.us()
            plain = plain or us
            note = "; keys/stages/parts " + ", ".join(sweep(form, work)) if form != "bf16" else ""
            rate = work.moved / us / 1e6
            say(f"decode {name:<14} {form:<4} {us:6.1f} us {rate:5.2f} TB/s {rate / 4.25:4.0%} "
                f"{plain / us:5.2f} x bf16{note}")  # fmt: skip
            del work


def sweep(form: str, work: Load) -> list[str]:
    """The best launch shapes, with their times; the rule is put back."""
    rule, parts, found = attention_decode.decode_tile, config._LONE_WARPS, []
    for tile in TILES:
        attention_decode.decode_tile = lambda *_, tile=tile: tile
        try:
            for config._LONE_WARPS in LONE_WARPS:
                found.append((work.us(), f"{tile.block_n}/{tile.num_stages}/{config._LONE_WARPS}"))
        except Exception as problem:
            say(f"{form} {tile}: {type(problem).__name__}: {str(problem)[:100]}", keep=False)
    attention_decode.decode_tile, config._LONE_WARPS = rule, parts
    return [f"{name} {us:.1f}" for us, name in sorted(found)[:5]]


def time_prefill() -> None:
    """Whole prompts and long chunks, whose keys are gathered; chunks so short that the cache is read directly."""
    for name, counts, contexts in (
        ("16 x 1024", [1024] * 16, [1024] * 16),
        ("8 x 512 after 2048", [512] * 8, [2560] * 8),
        ("64 x 16 after 1024", [16] * 64, [1040] * 64),
    ):
        plain = 0.0
        for form in ("bf16", *FORMS):
            work = load(form, counts, contexts)
            us = eager_us(work)
            plain = plain or us
            say(f"prefill {name:<18} {form:<4} {us:7.1f} us  {us / plain - 1:+6.1%} against bf16")
            del work


def eager_us(work: Load) -> float:
    """Lists of tiles come from the host, so chunks are not recorded; the list is made once."""
    work.run()
    return float(triton.testing.do_bench(work.run, warmup=5, rep=20)) * 1e3 / len(work.layers)


if __name__ == "__main__":
    sys.exit(main())
