"""`tokenmill bench cpu`: the command line of the comparison with other engines on this CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cache import figures_dir
from tokenmill.cli.bench_options import whole_numbers
from tokenmill.cli.options import DEFAULT_MODEL, CacheDir, Model, option
from tokenmill.cli.terminal import note, progress
from tokenmill.errors import ConfigError

CONTEXTS = "128,256,512,1024,2048,4096,8192"
BUSY = 0.5  # processes: above this load the machine has other things to do


def cpu(
    model: Model = DEFAULT_MODEL,
    against: Annotated[
        str, option("Peers: llama.cpp, openvino, vllm, transformers, or one form as in llama.cpp:q4_0.")
    ] = "",
    peer: Annotated[list[str] | None, option("NAME=PYTHON: the Python of the environment that has this peer.")] = None,
    threads: Annotated[int | None, option("Threads of every engine; unset: one per core.", min=1)] = None,
    rounds: Annotated[int, option("How often every engine has its turn.", min=1)] = 3,
    prompt: Annotated[int, option("Tokens per prompt.", min=2)] = 128,
    new: Annotated[int, option("Tokens per answer.", min=2)] = 128,
    requests: Annotated[str, option("How many at once, separated by commas.")] = "16,64",
    timeout: Annotated[float, option("Seconds that one question to an engine may take.", min=1)] = 900,
    scaling: Annotated[bool, option("Instead: against threads and context length.", "--scaling")] = False,
    contexts: Annotated[
        str | None, option("With --scaling: context lengths, separated by commas.", show_default=CONTEXTS)
    ] = None,
    plot: Annotated[Path | None, option("With --scaling: folder for the charts (SVG).")] = None,
    out: Annotated[Path | None, option("Write every figure to this file (JSON).", "--out", "-o")] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Compare with other engines on this CPU: one interleaved run, medians and spread.

    Prefill and decode are medians of three single requests per round; the other columns have one figure per round.

    Peers are optional and live in environments of their own: --against llama.cpp --peer llama.cpp=/venv/bin/python
    """
    from tokenmill.bench.cpu import Setup, compare
    from tokenmill.bench.cpu_scaling import draw
    from tokenmill.bench.cpu_scaling import scaling as measure_scaling
    from tokenmill.bench.cpu_table import as_json, legend, machine, notes, table
    from tokenmill.bench.peers import OURS, check_pythons, contenders
    from tokenmill.bench.peers.host import usable_cores

    for name, value in (("--plot", plot), ("--contexts", contexts)):
        if value is not None and not scaling:
            raise ConfigError(f"{name} is only of use with --scaling; add that, or leave {name} out")
    who = contenders(against)
    pythons = {OURS: sys.executable, **dict(map(_peer, peer or []))}
    check_pythons(who, pythons)
    path, vocab, form = _model(model)
    setup = Setup(
        model=path,
        vocab=vocab,
        forms=figures_dir("bench") / path.stem,
        pythons=pythons,
        threads=threads or usable_cores(),
        rounds=rounds,
        prompt=prompt,
        new=new,
        requests=whole_numbers(requests, "requests"),
        timeout=timeout,
        form=form,
    )
    before = machine()
    note(f"{before['cpu']}, {before['cores']} cores ({', '.join(before['features'])}), {setup.threads} threads")
    if (before["load"] or 0) > BUSY:
        note(f"(the machine is busy: load {before['load']}; figures will be low and their ratios doubtful)")

    def write(content: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(content, indent=1) + "\n")

    if scaling:
        results = measure_scaling(setup, who, whole_numbers(contexts or CONTEXTS, "contexts"), note)
        for count, rows in results.threads.items():
            typer.echo(f"\n{count} threads\n\n" + "\n".join(table(setup.columns, rows)))
        typer.echo("\n" + legend(rounds))
        written = draw(results, setup.columns, plot) if plot is not None else []
        for file in written:
            note(f"wrote {file}")
        write({"machine": before, **results.as_dict()})
    else:
        rows = compare(setup, who, note, lambda rows: write(as_json(setup, rows, before)))
        busy = table(setup.cpu_columns, rows)
        typer.echo("\n".join(["", *table(setup.columns, rows), "", *busy, "", legend(rounds), *notes(rows)]))
    if out is not None:
        note(f"wrote {out}")


def _model(model: str) -> tuple[Path, int, str]:
    """The model's file, how many tokens it knows, and the form of its weights."""
    from tokenmill.config import EngineConfig
    from tokenmill.engine.checkpoints import open_checkpoint
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.gguf_file import weights_form
    from tokenmill.model.weights.source import resolve

    with progress() as report:
        files = resolve(model, progress=report)
    config = open_checkpoint(EngineConfig(model=model, load_format="dummy"), files)[1]
    form = weights_form(files.path) if files.kind == "gguf" else str(config.get("dtype") or "")
    return files.path, spec_from_config(config).vocab_size, form


def _peer(word: str) -> tuple[str, str]:
    from tokenmill.bench.peers import KINDS

    name, _, python = word.partition("=")
    if name not in KINDS or not python:
        raise ConfigError(f"--peer is {word!r}; write NAME=PYTHON with NAME one of {', '.join(KINDS)}")
    return name, python
