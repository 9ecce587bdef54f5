"""The options of a command that are settings of an engine: made from their declaration in config.py."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill import cache
from tokenmill.cli.settings_file import take_config
from tokenmill.config import OPTIONS, WHERE
from tokenmill.option import Option

ALL_OPTIONS = (
    "Every setting of an engine is an option of this command: `tokenmill serve --help` lists them, docs/usage.md has "
    "their ranges."
)
_TYPES: dict[str, Any] = {"int": int | None, "float": float | None, "bool": bool | None, "str": str | None}

EngineSettings = dict[str, Any]  # what was typed or stands in the file of --config; the rest is left to the engine


def with_engine_options(
    command: str, show: Collection[str] | None = (WHERE,)
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an option for every setting of an engine but the model, and --config, to a command.

    The command's function has a parameter `engine`, which is given what was chosen. `show`: the groups that --help
    lists; None: all. Where the command has an option of its own of the same name, the engine's is `--engine-NAME`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        del own["engine"]
        parameters = {name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, one in own.items()}
        names = {f"engine_{name}" if name in own else name: name for name in OPTIONS if name != "model"}
        parameters["config"] = _parameter("config", _CONFIG, None)
        for parameter, name in names.items():
            one = OPTIONS[name]
            made = typed_option(one, command, parameter, hidden=show is not None and one.group not in show)
            parameters[parameter] = _parameter(parameter, Annotated[_TYPES[one.kind], made], None)
        parameters[_CONTEXT] = _parameter(_CONTEXT, typer.Context, inspect.Parameter.empty)

        def run(**values: Any) -> None:
            file: EngineSettings = values.pop(_CONTEXT).obj or {}  # whose model became the default of the command's own
            unset = {name for name, value in file.items() if value is None and OPTIONS[name].optional}  # null of JSON
            engine = {name: value for name, value in file.items() if name not in {"model", *unset}}
            del values["config"]
            for parameter, name in names.items():
                if (value := values.pop(parameter)) is not None:
                    engine[name] = value
            function(**values, engine=engine)

        run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        return run

    return decorate


def typed_option(one: Option, command: str = "", parameter: str = "", *, hidden: bool = False) -> Any:
    """How a command line takes one setting: None where nothing is typed."""
    flag = (parameter or one.name).replace("_", "-")
    return typer.Option(
        f"--{flag}/--no-{flag}" if one.kind == "bool" else f"--{flag}",
        help=one.line(command),
        rich_help_panel=one.group,
        show_default=False,  # None, which is not what holds: the line says what does
        hidden=hidden,
        callback=_use_cache_dir if one.name == "cache_dir" else None,
        metavar="FOLDER" if one.name == "cache_dir" else None,
    )


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


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


_CONTEXT = "engine_context"
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        help="File of settings (`tokenmill plan --apply`); what is typed here wins.",
        callback=take_config,
        is_eager=True,
    ),
]
