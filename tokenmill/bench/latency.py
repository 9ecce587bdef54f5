"""`tokenmill bench latency`: one batch at a time, from its prompts to its last token, and every step on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenmill.bench.achieved import Roof, Work
from tokenmill.bench.figures import Run, of_point
from tokenmill.bench.offline import answer_of, steps_of
from tokenmill.bench.stats import spread
from tokenmill.bench.workloads import Ask, Mix
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.llm import LLM

MIN_TOKENS = 3  # a prefill, and two decode steps to have a time between


@dataclass
class Batch:
    """One batch of equal requests, answered. Times in seconds."""

    run: Run
    prefill: float  # until every request had its first token
    decode_steps: list[float]  # each gives every request a token
    prefill_steps: int
    prefill_tokens: int  # of answers, said until then
    texts: list[tuple[list[int], list[int]]]  # prompts and answers


def answer(llm: LLM, asks: list[Ask]) -> Batch:
    llm.reset_prefix_cache()
    processor = llm._processor
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=asks[0].max_tokens)
    states = [processor.prepare(ask.prompt, params) for ask in asks]
    before, began, moment = steps_of(llm), time.perf_counter(), processor.engine.clock()
    for state in states:
        processor.submit(state)
    while not all(state.leader.num_output for state in states):
        processor.step()
    prefill, prefill_steps = time.perf_counter() - began, steps_of(llm) - before
    prefill_tokens = sum(state.leader.num_output for state in states)
    while processor.engine.has_work:
        processor.step()
    run = Run(time.perf_counter() - began, [answer_of(state.output(), moment) for state in states])
    last = run.answers[-1].times  # the last to have its first token: from then on all decode
    steps = [after - before for before, after in pairwise(last)]
    texts = [(state.leader.tokens[: state.leader.prompt_len], state.leader.output) for state in states]
    return Batch(run, prefill, steps, prefill_steps, prefill_tokens, texts)


def figures(batches: list[Batch], roof: Roof | None) -> dict[str, Any]:
    """Of all repeats of one batch size."""
    found = of_point([batch.run for batch in batches], apart=False)
    steps = [seconds for batch in batches for seconds in batch.decode_steps]
    size = len(batches[0].run.answers)
    prompt, output = batches[0].run.answers[0].prompt_tokens, batches[0].run.answers[0].output_tokens
    step, prefill = statistics.median(steps), statistics.median(batch.prefill for batch in batches)
    found |= {
        "batch": size,
        "step": spread(steps),
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": size * prompt / prefill,
        "decode_tokens_per_second": size / step,
    }
    if roof is not None:
        pairs = roof.shape.pairs
        read = Work(batches[0].prefill_steps, size * prompt, size, 0.0, size * pairs(0, prompt))
        keys = size * pairs(prompt, output - 1) / (output - 1)  # of a step, on average
        found["achieved_prefill"] = roof.achieved(read, prefill)
        found["achieved_decode"] = roof.achieved(Work(1, size, size, keys, keys), step)
    return found


def lines(points: list[dict[str, Any]]) -> list[str]:
    """A row per batch size: milliseconds, tokens per second, and what was reached of the machine's ceilings."""
    heads = ("batch", "TTFT ms", "TPOT ms", "step p50", "p90", "p99 ms", "prefill/s", "decode/s")
    shares = "achieved_decode" in points[0]
    more = f"{'prefill':>23}{'decode':>20}" if shares else ""
    out = [_row(heads) + more]
    for one in points:
        cells = [
            f"{one['batch']}",
            *(f"{1e3 * value:.2f}" for value in (one["ttft"]["mean"], one["tpot"]["mean"])),
            *(f"{1e3 * one['step'][name]:.2f}" for name in ("p50", "p90", "p99")),
            *(f"{one[name]:.1f}" for name in ("prefill_tokens_per_second", "decode_tokens_per_second")),
        ]
        text = _row(cells)
        if shares:
            text += _share(one["achieved_prefill"], "flops", 1e12, "TFLOP/s")
            text += _share(one["achieved_decode"], "bytes", 1e9, "GB/s")
        out.append(text)
    return out


def repeated(llm: LLM, mix: Mix, seed: int, repeats: int, warm_up: int) -> list[Batch]:
    """Batches with new prompts each time; the first `warm_up` are not measured."""
    batches = [answer(llm, mix.asks(seed + number)) for number in range(warm_up + repeats)]
    return batches[warm_up:]


def _row(cells: Sequence[str]) -> str:
    return f"{cells[0]:>5}" + "".join(f"{cell:>11}" for cell in cells[1:])


def _share(achieved: dict[str, Any], kind: str, unit: float, name: str) -> str:
    return f"{achieved[f'{kind}_per_second'] / unit:>9.3f} {name}{achieved[f'{kind}_share']:>6.0%}"
