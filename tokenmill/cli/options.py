"""The options that several commands share, and what they turn into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.engine_options import typed_option
from tokenmill.cli.terminal import note, progress
from tokenmill.config import OPTIONS, EngineConfig, command_defaults
from tokenmill.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenmill import LLM


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option of a command, under the heading `panel` of its --help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


MODEL_HELP = f"{OPTIONS['model'].help}."

Model = Annotated[str, option(MODEL_HELP, "--model", "-m")]
System = Annotated[str | None, option("A system message that precedes the conversation.")]
Verbose = Annotated[bool, option("Tell what was planned and why, and how fast it ran.", "--verbose", "-v")]


def _at_least_one(value: int) -> int:
    if value < 1:
        raise InvalidRequest(f"--max-tokens is {value}; it must be 1 or more")
    return value


_HOW = "How tokens are chosen"
MaxTokens = Annotated[int, option("Stop after this many tokens.", panel=_HOW, callback=_at_least_one)]
Temperature = Annotated[float, option("0 always takes the likeliest token.", panel=_HOW)]
TopP = Annotated[float, option("Choose among the likeliest tokens of this total probability.", panel=_HOW)]
TopK = Annotated[int, option("Choose among this many likeliest tokens; 0: all.", panel=_HOW)]
Seed = Annotated[int | None, option("The same seed gives the same answer.", panel=_HOW)]

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


@contextmanager
def opened_llm(model: str, verbose: bool, **chosen: Any) -> Iterator[LLM]:
    """The same, until the end of the block; `verbose` tells what was planned."""
    with open_llm(model, **chosen) as llm:
        if verbose:
            for line in llm.plan_lines():
                note(line)
        yield llm
