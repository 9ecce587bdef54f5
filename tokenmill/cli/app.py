"""The command table: which commands there are, what they share, and how errors leave the program."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tokenmill import __version__
from tokenmill.cli import (
    bench,
    chat,
    keys,
    ladder,
    models,
    plan,
    quantize,
    rank,
    route,
    run,
    serve,
    simulate,
    train_draft,
)
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


app = typer.Typer(
    cls=QuietGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def tokenmill(
    version: Annotated[
        bool, option("Print the version and exit.", "--version", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, option("Show the traceback behind an error; may stand anywhere.", "--debug")] = False,
) -> None:
    """Run language models on this machine.

    A MODEL is "default" (SmolLM2-135M-Instruct), a directory with a config.json, a .gguf file, or a hub name.
    """


app.command(name="run", cls=CommandWithFile, epilog=ALL_OPTIONS)(run.run)
app.command(name="chat", cls=CommandWithFile, epilog=ALL_OPTIONS)(chat.chat)
app.command(name="serve", cls=CommandWithFile)(serve.serve)
app.command(name="route")(route.route)
app.command(name="rank")(rank.rank)
app.add_typer(keys.keys, name="keys")
app.command(name="pull")(models.pull)
app.command(name="warm", cls=CommandWithFile, epilog=ALL_OPTIONS)(models.warm)
app.command(name="models")(models.models)
app.command(name="quantize")(quantize.quantize)
app.command(name="train-draft")(train_draft.train_draft)
app.add_typer(bench.bench, name="bench")
app.command(name="ladder")(ladder.ladder)
app.command(name="plan")(plan.plan)
app.command(name="simulate")(simulate.simulate)
