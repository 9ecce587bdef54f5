"""The file that `tokenmill plan --apply` writes and `tokenmill serve --config` reads: JSON or TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tokenmill.compat import did_you_mean, translate
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.parallel.layout import why_not
from tokenmill.plan.planner.search import Plan

# Settings of an engine that a server's own replace.
SERVERS_OWN = ("max_queued_requests", "max_queued_tokens")


@dataclass(frozen=True)
class ConfigFile:
    engine: dict[str, Any] = field(default_factory=dict)  # settings of EngineConfig
    serve: dict[str, Any] = field(default_factory=dict)  # options of `tokenmill serve`


def engine_settings(plan: Plan, model: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of one copy, and a sentence for each thing that the plan has and this version has not.

    Raises ConfigError where what is missing is what makes the model fit.
    """
    best = plan.best
    layout, room = best.layout, best.placement.room
    settings: dict[str, Any] = {
        "model": model,
        "max_model_len": plan.ask.longest,
        "max_num_seqs": room.max_rows,
        "max_num_batched_tokens": room.step_tokens,
    }
    if layout.dtype in ("bfloat16", "float16", "float32"):
        settings["dtype"] = layout.dtype
    if layout.weights.quantization is not None:
        settings["quantization"] = layout.weights.quantization
    if layout.kv.dtype != "auto":
        settings["kv_cache_dtype"] = layout.kv.dtype
    if layout.split.gpus > 1:
        settings["parallel"] = str(layout.split.layout)
        if (missing := why_not(layout.split.layout, plan.ask.fleet.device)) is not None:
            raise ConfigError(
                f"the plan cannot be applied as it is: parallel is {settings['parallel']!r}, and {missing}; "
                "plan with --available for what this version can run"
            )
    notes = []
    if best.prefill_copies:
        notes.append("separate copies for prompts and for decoding are not available yet: every copy does both")
    if best.copies > 1:
        notes.append(f"the file describes one of {best.copies} copies: start it once per GPU, behind a balancer")
    EngineConfig.from_options(**settings)  # refuses, in a sentence, what this version does not know
    return settings, notes


def write_config(path: Path, config: ConfigFile) -> None:
    """As JSON or TOML, by the file's ending."""
    tables = {"engine": config.engine, "serve": config.serve}
    if path.suffix == ".json":
        text = json.dumps(tables, indent=2) + "\n"
    elif path.suffix == ".toml":
        # JSON's strings, numbers and booleans are TOML's as well.
        text = "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
            for name, table in tables.items()
            if table
        )
    else:
        raise ConfigError(f"{path}: a config file ends in .json or .toml")
    path.write_text(text, encoding="utf-8")


def read_config_file(path: Path, serve_options: Iterable[str]) -> ConfigFile:
    """Refuses unknown names, with the closest known one; other engines' names are taken as LLM takes them."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from None
    try:
        tables = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except ValueError as error:
        raise ConfigError(f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    known = {"engine": {one.name for one in fields(EngineConfig)}, "serve": set(serve_options)}
    if not isinstance(tables, dict):
        raise ConfigError(f"{path} must hold the tables engine and serve")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {_outside(name, table, known, path.suffix == '.json')}")
        if name not in known:
            raise ConfigError(f"{path} has a table {name!r}; there are engine and serve")
    try:
        tables["engine"] = translate(tables.get("engine", {}))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, table in tables.items():
        for key in table:
            if key not in known[name]:
                raise ConfigError(f"{path}: {name} has no setting {key!r}; {did_you_mean(key, known[name])}")
            if name == "engine" and key in SERVERS_OWN:
                raise ConfigError(f"{path}: the queue is the server's: move {key} from engine to serve")
    return ConfigFile(tables["engine"], tables.get("serve", {}))


def _outside(key: str, value: object, known: dict[str, set[str]], is_json: bool) -> str:
    """What to say of a value that stands where a table should."""
    if key in known:
        return f"{key} is {value!r}; it must be a table of settings"
    homes = ["serve"] if key in SERVERS_OWN else [name for name, keys in known.items() if key in keys][:1]
    shown = " or ".join(f'"{name}"' if is_json else f"[{name}]" for name in homes or known)
    return f"{key} stands outside the tables engine and serve; move it under {shown}"
