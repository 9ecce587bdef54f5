"""What each quantization is worth on a GPU: decode steps by batch size, prefill, and a full offline load.

    python scripts/gpu_quantized.py --json found.json          # llama3-8b's shape, random weights
    python scripts/gpu_quantized.py --only bf16 int4 --batches 1 16 --no-load

One engine after the other in one process; a decode step is the median time between tokens while all requests decode:
not while prompts are still read, nor when the first have ended.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from h200_workloads import COMMON, SHAPES, Work, fixed

WEIGHTS = ("bf16", "int8", "int4", "int4,lm_head=int4", "w8a8", "w8a8,lm_head=w8a8", "fp8", "fp8,lm_head=fp8")
CACHES = ("auto", "int8", "fp8", "int4")
TOGETHER = (("bf16", "auto"), ("fp8", "fp8"), ("w8a8", "int8"))  # weights and cache, for many rows with long contexts
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--only", nargs="*", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--caches", nargs="*", choices=CACHES, default=CACHES)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--no-load", action="store_true", help="leave out the full load with each kind of cache")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"weights": {}, "together": {}, "caches": {}}

    def keep() -> None:  # after every part: a run that is cut short keeps what it has
        if arguments.json:
            arguments.json.write_text(json.dumps(found))

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | SHAPES[arguments.shape]))
        for name in arguments.only:
            found["weights"][name] = weights(folder, None if name == "bf16" else name, arguments.batches)
            print(name, json.dumps(found["weights"][name]), flush=True)
            keep()
        for form, cache in () if arguments.no_load else TOGETHER:
            name = f"{form} + kv {cache}"
            found["together"][name] = deep(folder, None if form == "bf16" else form, cache)
            print("256 rows at 1k:", name, f"{found['together'][name]:.2f} ms", flush=True)
            keep()
        for name in () if arguments.no_load else arguments.caches:
            found["caches"][name] = load(folder, name)
            print("cache", name, json.dumps(found["caches"][name]), flush=True)
            keep()
    table(found, arguments.batches)


def weights(folder: str, quantization: str | None, batches: list[int]) -> dict[str, Any]:
    llm = engine(folder, quantization=quantization)
    steps = {}
    for batch in batches:
        run(llm, fixed(batch, 32, 8, 9))
        steps[str(batch)] = run(llm, fixed(batch, 32, 48, 10))[1]
    run(llm, fixed(16, 4096, 1, 5))
    return {"decode_ms": steps, "prefill_s": min(fresh(llm, fixed(16, 4096, 1, 5)) for _ in range(2))}


def deep(folder: str, quantization: str | None, kv_cache_dtype: str) -> float:
    """Milliseconds of a decode step of 256 rows with 1,024 keys each and more."""
    llm = engine(folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    run(llm, fixed(256, 64, 8, 9))
    return run(llm, fixed(256, 1024, 96, 10))[1]  # the first has 32 tokens before the last prompt is read


def load(folder: str, kv_cache_dtype: str) -> dict[str, float]:
    llm = engine(folder, kv_cache_dtype=kv_cache_dtype)
    run(llm, fixed(512, 64, 8, 9))
    took = fresh(llm, fixed(512, 1024, 512, 6))
    return {"seconds": took, "out_tokens_per_second": 512 * 512 / took}


def fresh(llm: Any, work: Work) -> float:
    llm.reset_prefix_cache()
    return run(llm, work)[0]


def engine(folder: str, **settings: Any) -> Any:
    import torch

    from tokenmill import LLM

    gc.collect()  # the engine before this one
    torch.cuda.empty_cache()
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=512, **settings)


def run(llm: Any, work: Work) -> tuple[float, float]:
    """Seconds in all, and milliseconds between two tokens while all requests decode."""
    from tokenmill import SamplingParams

    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False) for _, answer in work]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
    took = time.perf_counter() - start
    errors = {output.error for output in outputs if output.error}
    assert not errors, errors
    gaps = full_gaps([output.metrics.token_times for output in outputs])
    return took, 1e3 * statistics.median(gaps) if gaps else 0.0


def full_gaps(times: list[list[float]], settle: int = 3) -> list[float]:
    """Seconds between steps in which every request decodes, from the times of each one's tokens; not the first few."""
    first, last = max(one[0] for one in times), min(one[-1] for one in times)
    shared = [moment for moment in times[-1] if first <= moment <= last]
    return [later - earlier for earlier, later in itertools.pairwise(shared)][settle:]


def table(found: dict[str, Any], batches: list[int]) -> None:
    plain = found["weights"].get("bf16")
    print("\n" + " " * 18 + "".join(f"{head:>10s}" for head in (*map(str, batches), "prefill s")))
    for name, one in found["weights"].items():
        cells = [one["decode_ms"][str(batch)] for batch in batches]
        print(f"{name:>18s}" + "".join(f"{cell:10.2f}" for cell in cells) + f"{one['prefill_s']:10.3f}")
        if plain and name != "bf16":
            ratios = [plain["decode_ms"][str(batch)] / cell for batch, cell in zip(batches, cells, strict=True)]
            print(f"{'x':>18s}" + "".join(f"{one:10.2f}" for one in [*ratios, plain["prefill_s"] / one["prefill_s"]]))
    for name, milliseconds in found["together"].items():
        print(f"256 rows at 1k, {name:>16s} {milliseconds:8.2f} ms")
    for name, one in found["caches"].items():
        print(f"cache {name:>6s} {one['seconds']:8.2f} s {one['out_tokens_per_second']:10.0f} out tok/s")


if __name__ == "__main__":
    main()
