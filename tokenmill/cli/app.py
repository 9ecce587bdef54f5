"""The command table: which commands there are, what they share, and how errors leave the program."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tokenmill import __version__
from tokenmill.cli.engine_options import ALL_OPTIONS
from tokenmill.cli.options import option
from tokenmill.cli.settings_file import CommandWithFile
from tokenmill.cli.terminal import note
from tokenmill.errors import ConfigError, InvalidRequest, TokenmillError

INTERRUPTED = 130  # what a shell reports for a program that ended by Ctrl-C
BROKEN_PIPE = 141  # ... and for one whose reader went away
WRONG_USE = 2
FAILED = 1


UsageError: Any = typer.BadParameter.__mro__[1]  # typer has it from click, or a click of its own


def _refuse(error: Any) -> NoReturn:
    """One line about words that are no command's. Who says nothing at all is shown the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    said = re.sub(", unable to parse string as an? [a-z]+", "", error.format_message()).replace(
        "Input should", "it must"
    )
    where = error.ctx.command_path if error.ctx is not None else "tokenmill"
    note(f"error: {said[:1].lower()}{said[1:].rstrip('.')}; `{where} --help` shows what it takes")
    raise typer.Exit(WRONG_USE) from None


class QuietGroup(TyperGroup):
    """Turns what a user can cause into one line and an exit code; a bug keeps its traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let --debug stand anywhere: people add it at the end of the command that failed."""
        end = args.index("--") if "--" in args else len(args)
        words = sorted(args[:end], key=lambda word: word != "--debug")  # stable: the others keep their order
        try:
            return super().parse_args(ctx, [*words, *args[end:]])
        except UsageError as error:
            _refuse(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:  # of the command that was asked for
            _refuse(error)
        except TokenmillError as error:
            if ctx.params.get("debug"):
                raise
            note(f"error: {error}")
            raise typer.Exit(WRONG_USE if isinstance(error, InvalidRequest | ConfigError) else FAILED) from None
        except KeyboardInterrupt as stop:
            note(str(stop))  # what was under way may have something to say; an empty line otherwise
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The interpreter flushes stdout on its way out and would complain about the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit


# Where each command is, and what it takes beside its own options
_WITH_FILE: dict[str, Any] = {"cls": CommandWithFile}
_WITH_ENGINE = {**_WITH_FILE, "epilog": ALL_OPTIONS}
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "run": ("tokenmill.cli.run", _WITH_ENGINE),
    "chat": ("tokenmill.cli.chat", _WITH_ENGINE),
    "serve": ("tokenmill.cli.serve", _WITH_FILE),
    "route": ("tokenmill.cli.route", {}),
    "rank": ("tokenmill.cli.rank", {}),
    "keys": ("tokenmill.cli.keys", {}),
    "pull": ("tokenmill.cli.models", {}),
    "warm": ("tokenmill.cli.models", _WITH_ENGINE),
    "models": ("tokenmill.cli.models", {}),
    "quantize": ("tokenmill.cli.quantize", {}),
    "train-draft": ("tokenmill.cli.train_draft", {}),
    "bench": ("tokenmill.cli.bench", {}),
    "ladder": ("tokenmill.cli.ladder", {}),
    "plan": ("tokenmill.cli.plan", {}),
    "simulate": ("tokenmill.cli.simulate", {}),
}


def app_for(words: Sequence[str]) -> typer.Typer:
    """The program as far as this command line needs it: options of an engine take their time in every command."""
    options = list(takewhile(lambda word: word.startswith("-"), words))
    command = words[len(options)] if len(options) < len(words) else ""
    alone = command in COMMANDS and not {"--help", "-h"} & set(options)
    return _made((command,) if alone else tuple(COMMANDS))


def __getattr__(name: str) -> Any:
    """`app` is the whole program."""
    if name == "app":
        return app_for(())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _made(commands: tuple[str, ...]) -> typer.Typer:
    app = typer.Typer(
        cls=QuietGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(tokenmill)
    for name, command, options in _found(commands):
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name=name, **options)(command)
    return app


def _found(names: Sequence[str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for name in names:
        module, options = COMMANDS[name]
        yield name, getattr(import_module(module), name.replace("-", "_")), options


def tokenmill(
    version: Annotated[
        bool, option("Print the version and exit.", "--version", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, option("Show the traceback behind an error; may stand anywhere.", "--debug")] = False,
) -> None:
    """Run language models on this machine.

    A MODEL is "default" (SmolLM2-135M-Instruct), a directory with a config.json, a .gguf file, or a hub name.
    """
