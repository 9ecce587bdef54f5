"""`--config FILE`: its settings are the defaults of options, and an error about one of them says where it stands."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from tokenmill.config import OPTIONS
from tokenmill.errors import ConfigError, TokenmillError

_KINDS = {int: "a whole number", float: "a number"}
_TABLES = "tokenmill.tables"  # what the file holds, in the context's notes
_DEFAULTS = ("model", "cache_dir")  # settings of the engine that a command has to know before it makes one


def take_config(context: typer.Context, path: Path | None) -> Path | None:
    """A config file's settings hold where nothing is typed: the engine's are the context's object, the server's the
    defaults of its options, and nothing to other commands.
    """
    if path is not None:
        from tokenmill.plan.planner.configfile import read_config_file

        root: Any = context.find_root().command
        serve = root.commands["serve"]
        names = [one.name for one in serve.params if one.name and one.name not in ("config", "model")]
        found = read_config_file(path, names)
        context.obj = found.engine
        context.default_map = {
            **{name: one for name, one in found.engine.items() if name in _DEFAULTS},
            **{name: one for name, one in found.serve.items() if context.command is serve and name not in found.engine},
        }
        _check_kinds(path, context)
        context.meta[_TABLES] = path, {"engine": found.engine, "serve": found.serve}
    return path


def _check_kinds(path: Path, context: typer.Context) -> None:
    """Refuses what would be taken for something else on the way to an option: true for 1 or "True", 2.5 for 2."""
    hints = get_type_hints(inspect.unwrap(context.command.callback)) if context.command.callback else {}
    texts = {name: one for name, one in context.obj.items() if OPTIONS[name].kind == "str"}
    for name, value in {**texts, **(context.default_map or {})}.items():
        kinds = get_args(hints.get(name)) or (hints.get(name),)  # int | None, or one type
        wanted = next((words for kind, words in _KINDS.items() if kind in kinds), "a text")
        whole = int in kinds and isinstance(value, float)
        if whole or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{path}: {name} is {json.dumps(value)}; it must be {wanted}")


class CommandWithFile(TyperCommand):
    """Adds the file and the key to errors about values that were not typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name:
                error.message += _told([error.param.name], ctx)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenmillError as error:
            _, tables = ctx.meta.get(_TABLES, (None, {}))
            settings = {key: value for table in tables.values() for key, value in table.items()}
            named = [key for key, value in settings.items() if _is_about(str(error), key, value)]
            error.args = (f"{error}{_told(named, ctx)}",)
            raise


def _told(keys: list[str], ctx: Any) -> str:
    """Where those of the settings stand that come from the file: " (engine.seed in settings.toml)"."""
    path, tables = ctx.meta.get(_TABLES, (None, {}))
    places = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key in keys
        if key in table and getattr(ctx.get_parameter_source(_parameter(key, ctx)), "name", "") != "COMMANDLINE"
    ]
    return f" ({' and '.join(places)} in {path})" if places else ""


def _parameter(key: str, ctx: Any) -> str:
    """Of the option for a key: see `with_engine_options`."""
    return f"engine_{key}" if f"engine_{key}" in ctx.params else key


def _is_about(message: str, key: str, value: object) -> bool:
    """Whether a message names a setting. Some are words of the language, too: then it has to show the value as well."""
    option = key.replace("_", "-")
    if not re.search(rf"(?<![\w-])({re.escape(key)}|--{re.escape(option)})(?![\w-])", message):
        return False
    if "_" in key or f"--{option}" in message:
        return True
    leaves = [*value, *value.values()] if isinstance(value, dict) else [value]
    return any(str(leaf) in message for leaf in leaves)
