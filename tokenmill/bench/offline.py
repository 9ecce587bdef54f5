"""`tokenmill bench offline`: how many tokens per second `LLM.generate` gives on a workload."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tokenmill.bench.figures import Answer, Run
from tokenmill.bench.peers.serve import peak_bytes
from tokenmill.bench.workloads import Ask
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.llm import LLM
    from tokenmill.outputs import RequestOutput


def generate(llm: LLM, asks: list[Ask], *, show: bool) -> tuple[Run, int]:
    """All requests at once, as `LLM.generate` takes them; with it the number of steps. `show`: a bar at a terminal."""
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=ask.max_tokens) for ask in asks]
    before, clock = steps_of(llm), llm._processor.engine.clock
    began, moment = time.perf_counter(), clock()
    outputs = llm.generate([ask.prompt for ask in asks], params, use_tqdm=show)
    run = Run(time.perf_counter() - began, [answer_of(output, moment) for output in outputs])
    return run, steps_of(llm) - before


def answer_of(output: RequestOutput, began: float) -> Answer:
    """An engine's output as every benchmark counts it. Times are since the run `began`: to wait is part of it."""
    metrics, first = output.metrics, output.outputs[0]
    times = [at - began for at in metrics.token_times]
    return Answer(
        seconds=(metrics.finished or began) - began,
        text=first.text,
        times=times,
        finish=first.finish_reason,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=metrics.reused_tokens,
        output_tokens=len(first.token_ids),
        error=first.finish_reason if first.finish_reason in ("error", "deadline") else None,
        message=output.error or "",
    )


def steps_of(llm: LLM) -> int:
    return llm._built.engine.scheduler.stats.steps


def memory_of(llm: LLM) -> dict[str, int]:
    """Peak bytes of this process, and on the device."""
    import torch

    device = llm._built.engine.runner.device if hasattr(llm._built.engine.runner, "device") else torch.device("cpu")
    on_device = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return {"peak": peak_bytes(os.getpid()), "device": on_device}
