"""Checks and times log-probabilities and shaped logits on a GPU: the kernels by themselves, then whole decode steps.

    python scripts/gpu_logprobs.py                     # kernels, then 64 rows of llama3-8b with random weights
    python scripts/gpu_logprobs.py --no-steps
    python scripts/gpu_logprobs.py --shape qwen3-0.6b --rows 16 64

Steps of one kind are run three times, and the fastest is told: the first ones compile and record.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_quantized import engine, full_gaps
from gpu_sample import Timer, make_logits
from h200_workloads import COMMON, SHAPES, fixed

from tokenmill import SamplingParams
from tokenmill.ops import reference, shaping
from tokenmill.ops.triton.sample.logprobs import logprobs
from tokenmill.ops.triton.sample.shape import shape
from tokenmill.ops.types import LOGPROB_BUCKETS, LOGPROB_WORDS, ShapeBatch

VOCAB = 151936
ROWS = (1, 16, 64, 256)
LENGTH = 4096  # of the table of tokens
STEPS = {  # what the requests of a batch ask for
    "plain": {},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "bias": {"logit_bias": dict.fromkeys(range(100, 200), 1.0)},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": [5]},
    "both": {"logprobs": 5, "repetition_penalty": 1.1},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "all": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "logprobs": 5, "presence_penalty": 0.5},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-steps", action="store_true", help="kernels only")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[64])
    parser.add_argument("--only", nargs="*", choices=STEPS)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = check_logprobs() + check_shape()
    print(f"checks {'FAILED' if failed else 'passed'}", flush=True)
    time_kernels(Timer())
    if not arguments.no_steps:
        time_steps(arguments.shape, arguments.rows, arguments.tokens, arguments.only or list(STEPS))
    return int(failed > 0)


# Checks


def check_logprobs() -> int:
    wrong = 0
    for vocab, kind, dtype in (
        (VOCAB, "real", torch.bfloat16), (VOCAB, "real", torch.float32), (128256, "flat", torch.bfloat16),
        (128256, "ties", torch.float32), (50257, "masked", torch.float32), (262144, "real", torch.bfloat16),
    ):  # fmt: skip
        logits = make_logits(65, vocab, kind).to(dtype)
        tokens = torch.randint(0, vocab, (65,), device="cuda")
        tokens[:40] = logits[:40].argmax(-1)
        exact = logits.double()
        scores = exact.log_softmax(-1)
        order = exact.sort(dim=-1, descending=True, stable=True).indices
        for k in LOGPROB_BUCKETS:
            widths = torch.full((65,), k, dtype=torch.int32, device="cuda")
            words = logprobs(logits, tokens, widths, k)
            floats = words.view(torch.float32)
            chosen = tokens[:, None]
            rank = (exact > exact.gather(1, chosen)).sum(-1) + 1
            checks = {
                "token": words[:, 0].equal(tokens.int()),
                "rank": words[:, 1].equal(rank.int()),
                "value": close(floats[:, 2], scores.gather(1, chosen)[:, 0]),
                "best": words[:, LOGPROB_WORDS : LOGPROB_WORDS + k].equal(order[:, :k].int()),
                "values": close(floats[:, LOGPROB_WORDS + k :], scores.gather(1, order[:, :k])),
                "any batch": words[7:9].equal(logprobs(logits[7:9], tokens[7:9], widths[7:9], k)),
            }
            bad = [name for name, right in checks.items() if not right]
            wrong += len(bad)
            if bad:
                print(f"WRONG log-probabilities, {vocab} {kind} {dtype} {k}: {', '.join(bad)}", flush=True)
    return wrong


def close(mine: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(mine.double(), exact, rtol=2e-6, atol=5e-5)


def shape_batch(rows: int, length: int, penalized: bool) -> ShapeBatch:
    tokens = torch.randint(0, VOCAB, (rows, LENGTH), dtype=torch.int32, device="cuda")
    tokens[:, ::5] = 11

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    flipped = torch.arange(rows, device="cuda").flip(0)
    return ShapeBatch(
        rows=flipped, mask_rows=flipped, positions=column(length, torch.int64), tokens=tokens,
        prompt_len=column(length // 2, torch.int32), repetition=column(1.2 if penalized else 1.0),
        presence=column(0.5 if penalized else 0.0), frequency=column(0.1 if penalized else 0.0),
        stops_from=column(0, torch.int32), edits={}, edits_at=column(0, torch.int64), masks=None,
        counters=torch.zeros(rows, VOCAB, dtype=torch.int32, device="cuda"),
    )  # fmt: skip


def check_shape() -> int:
    wrong = 0
    for rows, length, slots in ((1, LENGTH, 1), (65, 1500, 65), (65, 700, 13), (256, 40, 256)):
        batch = shape_batch(rows, length, penalized=True)
        assert batch.counters is not None
        batch.counters = batch.counters[:slots]
        logits = make_logits(rows, VOCAB, "real")
        mine, theirs = logits.clone(), logits.clone()
        shape(mine, batch)
        shaping.shape(theirs, batch)
        if not torch.allclose(mine, theirs, rtol=1e-6, atol=1e-5) or batch.counters.any():
            wrong += 1
            print(f"WRONG penalties, {rows} rows of {length} tokens, {slots} counters", flush=True)
    return wrong


# Timing


def time_kernels(timer: Timer) -> None:
    print(f"\nus per call, {VOCAB} tokens" + "".join(f"{rows:>9} rows" for rows in ROWS), flush=True)
    calls: dict[str, Callable[[int], Callable[[torch.Tensor, Any], Any]]] = {
        f"log-probabilities {width}": partial(logprobs_call, width, logprobs) for width in (0, 1, 5, 20, 32)
    }
    calls["log-probabilities 5 in torch"] = partial(logprobs_call, 5, reference.logprobs)
    for length in (100, 1000, LENGTH):
        calls[f"penalties, {length} tokens"] = partial(shape_call, length, True)
    calls["no penalties"] = partial(shape_call, 1000, False)
    for name, make in calls.items():
        line = f"{name:28}"
        for rows in ROWS:
            copies = make_logits(3 * rows, VOCAB, "real").view(3, rows, VOCAB)
            inputs = list(copies if "penal" in name else copies.bfloat16())
            line += f"{timer.microseconds(make(rows), inputs, None):14.1f}"  # type: ignore[arg-type]
        print(line, flush=True)


def logprobs_call(width: int, op: Callable[..., Any], rows: int) -> Callable[[torch.Tensor, Any], Any]:
    tokens = torch.randint(0, VOCAB, (rows,), device="cuda")
    widths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    return lambda logits, _: op(logits, tokens, widths, width)


def shape_call(length: int, penalized: bool, rows: int) -> Callable[[torch.Tensor, Any], Any]:
    batch = shape_batch(rows, length, penalized)
    return lambda logits, _: shape(logits, batch)


def time_steps(shape_name: str, batches: list[int], answer: int, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | SHAPES[shape_name]))
        llm = engine(folder)
    graphs = llm._built.engine.runner._graphs
    print(f"\n{shape_name}, {answer} tokens: ms per step (seconds in all; replayed, plain and all decode steps)")
    for rows in batches:
        for name in names:
            best = (float("inf"), 0.0, "")
            for _ in range(3):  # the first ones compile and record
                work = fixed(rows, 128, answer, seed=rows)
                settings = {"temperature": 0.0} | STEPS[name]
                params = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False, **settings)
                before = graphs.replays, graphs.plain_runs
                begun = time.perf_counter()
                outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
                took = time.perf_counter() - begun
                assert not any(output.error for output in outputs)
                gaps = sorted(full_gaps([output.metrics.token_times for output in outputs]))
                counts = f"{graphs.replays - before[0]}, {graphs.plain_runs - before[1]} of {answer - 1}"
                best = min(best, (gaps[len(gaps) // 2] * 1e3, took, counts))
            print(f"{rows:4} rows  {name:12} {best[0]:7.3f} ({best[1]:.3f}; {best[2]})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
