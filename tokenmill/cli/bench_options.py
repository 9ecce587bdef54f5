"""The options that the benchmarks share, what they turn into, and where their figures go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.options import option
from tokenmill.cli.terminal import check_writable, note
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.plan.demand.workload import Workload

_WHAT = "What is asked"
_HOW = "How it is measured"
_OUT = "What comes out"

Input = Annotated[int, option("Tokens per prompt, without --trace.", "--input", "--prompt-tokens", panel=_WHAT, min=1)]
Output = Annotated[int, option("Tokens per answer, without --trace.", "--output", "--max-tokens", panel=_WHAT, min=1)]
Trace = Annotated[Path | None, option("Azure CSV, Mooncake JSONL or ShareGPT JSON: lengths.", panel=_WHAT)]
LongestInput = Annotated[int | None, option("With --trace: cut longer prompts to this.", panel=_WHAT, min=1)]
LongestOutput = Annotated[int | None, option("With --trace: cut longer answers to this.", panel=_WHAT, min=1)]
Seed = Annotated[int, option("Other prompts, other random times.", panel=_WHAT, min=0)]
Repeats = Annotated[int, option("How often, each time with new prompts; for intervals.", panel=_HOW, min=1)]
WarmUp = Annotated[int | None, option("Requests before, which do not count; unset: a few.", panel=_HOW, min=0)]
DraftAcceptance = Annotated[
    float | None,
    option("Also with drafts of known answers, each right with this probability.", panel=_HOW, min=0.0, max=1.0),
]
DraftTokens = Annotated[
    int | None, option("With --draft-acceptance: drafts per step and request, at most; unset: 4.", panel=_HOW, min=1)
]
Ceilings = Annotated[bool, option("Measure first what this machine can at best, and say how near it was.", panel=_HOW)]
Price = Annotated[str | None, option("Of the machine: 2.5/h. For cost per token.", panel=_OUT)]
Json = Annotated[Path | None, option("Every figure; - is stdout.", "--json", panel=_OUT)]
Plot = Annotated[Path | None, option("Folder for pictures (SVG).", panel=_OUT)]

STDOUT = Path("-")


def check_targets(json: Path | None, plot: Path | None, *files: Path | None) -> None:
    """Refuse places for results that cannot be written, before anything is measured."""
    check_writable(None if json == STDOUT else json, *files, folder=plot)


def workload(
    trace: Path | None,
    requests: int | None,
    prompt: int,
    output: int,
    longest_prompt: int | None = None,
    longest_answer: int | None = None,
) -> Workload:
    """From a trace, of which `requests` are the first; or so many equal ones."""
    from tokenmill.bench.workloads import clipped
    from tokenmill.plan.demand.traces import read_trace
    from tokenmill.plan.demand.workload import fixed

    if trace is not None:
        return clipped(read_trace(trace, limit=requests), longest_prompt, longest_answer)
    if longest_prompt is not None or longest_answer is not None:
        raise ConfigError("--longest-input and --longest-output cut a trace's requests; name one with --trace")
    return fixed(f"{prompt} + {output} tokens", requests or 1, prompt, output)


def lengths(work: Workload) -> str:
    """For people: what the requests are like."""
    if len(set(work.prompts)) == len(set(work.outputs)) == 1:
        return f"prompts of {work.prompts[0]} and answers of {work.outputs[0]} tokens"
    return f"lengths of {work.name}"


def numbers(text: str, name: str, least: float) -> list[float]:
    """From "1,2,4"."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not least <= one < float("inf") for one in found):
        raise ConfigError(f"--{name} is {text!r}; it is written as 1 or 1,2,4, each {least:g} or more")
    return found


def whole_numbers(text: str, name: str) -> tuple[int, ...]:
    found = numbers(text, name, 1)
    if any(one % 1 for one in found):
        raise ConfigError(f"--{name} is {text!r}; it must be whole numbers, separated by commas")
    return tuple(map(int, found))


def give_out(found: dict[str, Any], told: list[str], target: Path | None) -> None:
    """The lines to stdout and the data to a file; or the data alone to stdout."""
    text = json.dumps(found, indent=1)
    if target == STDOUT:
        typer.echo(text)
        return
    typer.echo("\n".join(told))
    if target is not None:
        target.write_text(text + "\n")
        note(f"wrote {target}")
