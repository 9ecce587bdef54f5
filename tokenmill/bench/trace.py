"""`tokenmill bench trace`: records decode steps and mixed steps as Chrome traces, and draws them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenmill.bench.timeline import draw, read
from tokenmill.params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.llm import LLM


def record(llm: LLM, folder: Path, *, rows: int, context: int, steps: int = 4) -> list[Path]:
    """Bring `rows` requests to `context` tokens, trace some decode steps, then the steps that take in a new prompt.

    One prompt comes in beside them before, untraced: what is compiled or recorded at first use is not a step's cost.
    """
    llm.reset_prefix_cache()
    processor = llm._processor
    vocab = processor.vocab_size
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64, detokenize=False)
    prompts = [[(row * 7919 + place * 31) % vocab for place in range(context)] for row in range(rows + 2)]
    states = [processor.prepare(prompt, params) for prompt in prompts[:-1]]
    for state in states[:-1]:
        processor.submit(state)
    while any(state.leader.num_output < 8 for state in states[:-1]):
        processor.step()
    first = processor.prepare(prompts[-1], replace(params, max_tokens=2 * steps))
    processor.submit(first)
    while not first.leader.finished:
        processor.step()
    title = f"{rows} rows at {context} tokens, {steps} steps"
    written = _profile(llm, folder / "decode.json", steps, f"decode: {title}")
    processor.submit(states[-1])
    written += _profile(llm, folder / "mixed.json", steps, f"mixed: {title}, a prompt of {context} tokens comes in")
    for state in states:
        processor.cancel(state)
    while processor.engine.has_work:
        processor.step()
    return written


def _profile(llm: LLM, target: Path, steps: int, title: str) -> list[Path]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            with torch.profiler.record_function("engine step"):
                llm._processor.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    target.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(target))
    picture = target.with_suffix(".svg")
    picture.write_text(draw(read(target), title))
    return [target, picture]
