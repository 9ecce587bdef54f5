"""`tokenmill run`: answer one prompt, from the command line or from standard input."""

from __future__ import annotations

import os
import stat
import sys
from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.answer import Prompt, stream_answer
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import note
from tokenmill.errors import InvalidRequest


@with_engine_options("run")
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer. Piped input is added to it, or used instead.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    system: options.System = None,
    raw: Annotated[bool, option("Continue the text as it is, without the chat template.", "--raw")] = False,
    verbose: options.Verbose = False,
    max_tokens: options.MaxTokens = options.DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = options.DEFAULT_TEMPERATURE,
    top_p: options.TopP = options.DEFAULT_TOP_P,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    *,
    engine: EngineSettings,
) -> None:
    """Answer one PROMPT and exit.

    The answer streams to stdout; everything else goes to stderr.
    """
    from tokenmill.params import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    question = _as_prompt(_read_prompt(prompt), system, raw)
    with options.opened_llm(model, verbose, **engine) as llm:
        answer = stream_answer(llm, question, params)
        if answer.cut_short:
            note(answer.cut("--max-tokens"))
        if verbose:
            note(answer.speed())
    if answer.interrupted:
        raise KeyboardInterrupt


def _as_prompt(text: str, system: str | None, raw: bool) -> Prompt:
    if raw:
        if system is not None:
            raise InvalidRequest("--raw leaves out the chat template, so --system has no place; drop one of the two")
        return text
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _read_prompt(argument: str | None) -> str:
    """The argument, and whatever is piped in: `cat letter.txt | tokenmill run "Summarise this letter:"`."""
    if argument is None or argument == "-":
        if sys.stdin.isatty():
            note("(type the prompt; Ctrl-D ends it)")
        text = sys.stdin.read()
    elif _piped():
        text = f"{argument}\n\n{sys.stdin.read()}".rstrip()
    else:
        text = argument
    if not text.strip():
        raise InvalidRequest('the prompt is empty; give one as in: tokenmill run "Why is the sky blue?"')
    return text.encode("utf-8", "replace").decode("utf-8")  # an argument may hold bytes that are no text


def _piped() -> bool:
    """Whether stdin is a pipe or a file: a terminal or /dev/null adds nothing to a prompt that was given."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or replaced by an object that is no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
