"""Measures how much memory torch holds at once while something runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tokenmill import LLM


def peak_bytes(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `work`, and the most bytes that what it allocated on the CPU took at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = work()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events = record.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return result, peak


def largest_step(llm: LLM, prompts: Any, params: Any, pooling: str | None = None) -> tuple[int, int, int]:
    """Runs the prompts, with `pooling` for their vectors; returns the largest peak of a step, the most tokens of a step
    and the most it sampled."""
    runner = llm._processor.engine.runner
    launch = runner.launch
    seen: list[tuple[int, int, int]] = []
    gc.collect()  # what an engine before this one held must not be given back while a step is measured

    def measured(step: Any) -> Any:
        pending, peak = peak_bytes(lambda: launch(step))
        seen.append((peak, step.num_tokens, sum(step.samples)))
        return pending

    runner.launch = measured  # type: ignore[method-assign]
    try:
        if pooling is None:
            llm.generate(prompts, params, use_tqdm=False)
        else:
            llm.embed(prompts, use_tqdm=False, pooling=pooling)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    peaks, tokens, samples = zip(*seen, strict=True)
    return max(peaks), max(tokens), max(samples)
