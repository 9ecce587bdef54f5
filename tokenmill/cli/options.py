"""The options that several commands share, and what they turn into."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import cache
from tokenmill.cli.terminal import note, progress
from tokenmill.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenmill import LLM

MODEL_HELP = '"default", a directory, a .gguf file, or a hub name (org/name, org/name:file.gguf).'

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
System = Annotated[str | None, typer.Option(help="A system message that precedes the conversation.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell what was planned and why, and how fast it ran.")]


def _at_least_one(value: int) -> int:
    if value < 1:
        raise InvalidRequest(f"--max-tokens is {value}; it must be 1 or more")
    return value


_HOW = "How tokens are chosen"
MaxTokens = Annotated[
    int, typer.Option(help="Stop after this many tokens.", callback=_at_least_one, rich_help_panel=_HOW)
]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.", rich_help_panel=_HOW)]
TopP = Annotated[
    float, typer.Option(help="Choose among the likeliest tokens of this total probability.", rich_help_panel=_HOW)
]
TopK = Annotated[int, typer.Option(help="Choose among this many likeliest tokens; 0: all.", rich_help_panel=_HOW)]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.", rich_help_panel=_HOW)]

_WHERE = "Where it runs"
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:1; unset: a GPU if there is one.", rich_help_panel=_WHERE)
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; unset: what suits model and device.", rich_help_panel=_WHERE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt plus answer, in tokens; unset: the model's own.", rich_help_panel=_WHERE),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="How weights are kept: int8, int4, w8a8, fp8, auto, or by layer: int4,layers.0-3=int8; "
        "unset: as they are.",
        rich_help_panel=_WHERE,
    ),
]
KVCacheDtype = Annotated[
    str | None,
    typer.Option(
        help="How keys and values are kept: int8, fp8, int4, or a type of floats; unset: what suits model and device.",
        rich_help_panel=_WHERE,
    ),
]


def _use_cache_dir(context: typer.Context, folder: str | None) -> str | None:
    """What is typed holds for this process and for those it starts (engines, workers), as the variables would."""
    if folder is not None and not context.resilient_parsing:
        chosen = cache.environment(folder)
        before = {name: os.environ.get(name) for name in chosen}
        os.environ.update(chosen)

        def restore() -> None:  # a caller that goes on after this command has its own environment again
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

        context.call_on_close(restore)
    return folder


CacheDir = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Where downloads and builds are kept; unset: TOKENMILL_CACHE, or tokenmill in XDG_CACHE_HOME or ~/.cache.",
        callback=_use_cache_dir,
        rich_help_panel=_WHERE,
        show_default=False,
    ),
]

LOAD = "How much, how long"
Policy = Annotated[
    str | None,
    typer.Option(
        help="Who runs first: priority, fcfs (first come) or sjf (shortest predicted answer); unset: priority.",
        rich_help_panel=LOAD,
    ),
]
SloItlMs = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds that 95 % of the gaps between tokens may take: a step reads as much of prompts as that "
        "allows; unset: as much as fits.",
        rich_help_panel=LOAD,
    ),
]
SloTtftMs = Annotated[
    float | None,
    typer.Option(
        help="With --slo-itl-ms: milliseconds to a first token; where this is missed more often, nobody is held back.",
        rich_help_panel=LOAD,
    ),
]

DEFAULT_MODEL = "default"
DEFAULT_MAX_TOKENS = 512
DEFAULT_TEMPERATURE = 0.2
DEFAULT_TOP_P = 0.9


def open_llm(model: str, **chosen: Any) -> LLM:
    """Load the model for one conversation; what is None is left to the engine to solve."""
    with progress() as report:
        from tokenmill import LLM  # torch comes with it, so it waits until options are known to be good
        from tokenmill.ops.native.library import where_else

        llm = LLM(
            model=model,
            max_num_seqs=1,  # one conversation is one request at a time
            seed=random.getrandbits(32),  # without --seed another answer each time
            progress=report,
            **{name: value for name, value in chosen.items() if value is not None},
        )
    if llm.slower is not None:
        note(llm.slower)
    elif (elsewhere := where_else()) is not None:
        note(f"({elsewhere})")
    return llm
