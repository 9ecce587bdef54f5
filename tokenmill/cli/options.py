"""The options that several commands share, and what they turn into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.engine_options import typed_option
from tokenmill.cli.terminal import note, progress
from tokenmill.config import OPTIONS, EngineConfig, command_defaults
from tokenmill.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenmill import LLM

MODEL_HELP = f"{OPTIONS['model'].help}."

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

# Settings of an engine, for commands that take a few of them.
Device = Annotated[str | None, typed_option(OPTIONS["device"])]
Dtype = Annotated[str | None, typed_option(OPTIONS["dtype"])]
LoadFormat = Annotated[str | None, typed_option(OPTIONS["load_format"])]
MaxModelLen = Annotated[int | None, typed_option(OPTIONS["max_model_len"])]
CacheDir = Annotated[str | None, typed_option(OPTIONS["cache_dir"])]

DEFAULT_MODEL: str = OPTIONS["model"].default
DEFAULT_MAX_TOKENS = 512
DEFAULT_TEMPERATURE = 0.2
DEFAULT_TOP_P = 0.9


def open_llm(model: str, **chosen: Any) -> LLM:
    """Load the model for one conversation."""
    settings = {**command_defaults("run"), **chosen}
    EngineConfig.from_options(model=model, **settings)  # what is wrong is told before torch is imported
    with progress() as report:
        from tokenmill import LLM
        from tokenmill.ops.native.library import where_else

        llm = LLM(model=model, progress=report, **settings)
    if llm.slower is not None:
        note(llm.slower)
    elif (elsewhere := where_else()) is not None:
        note(f"({elsewhere})")
    return llm
