"""`tokenmill models`, `pull` and `warm`: the models on this machine, bringing one here, and making its start quick."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import note, progress, size
from tokenmill.config import LOAD, WHERE, EngineConfig, command_defaults


def models(
    remove: Annotated[str | None, option("Delete this model's files.", metavar="NAME")] = None,
    cache_dir: options.CacheDir = None,
) -> None:
    """List the models in the cache with their sizes, or remove one."""
    from tokenmill.model.weights import source

    if remove is not None:
        source.remove(remove)
        typer.echo(f"removed {remove}")
        return
    cached = source.list_cached()
    if not cached:
        note("no models yet; get the default one with: tokenmill pull")
        return
    width = max(len(model.name) for model in cached)
    for model in cached:
        typer.echo(f"{model.name:<{width}}  {size(model.size):>9}  {model.path}")


def pull(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    cache_dir: options.CacheDir = None,
) -> None:
    """Download a MODEL, so that it starts without a network later."""
    from tokenmill.model.weights.source import resolve

    with progress() as report:
        files = resolve(model, progress=report)
    typer.echo(f"{files.name} is at {files.path}")


@with_engine_options("warm", show=(WHERE, LOAD))
def warm(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    *,
    engine: EngineSettings,
) -> None:
    """Get a MODEL ready to start quickly: download it, build the CPU library, compile the GPU's kernels.

    Which kernels there are follows from the model, the GPU and these options: give the ones it will be served with.
    For container images: all of it is kept in the cache folder (--cache-dir).
    """
    settings = {**command_defaults("warm"), **engine}
    EngineConfig.from_options(model=model, **settings)  # what is wrong is told before torch is imported
    with progress() as report:
        from tokenmill import LLM

        llm = LLM(model=model, progress=report, **settings)
    with llm:
        lines = [line for line in llm.plan_lines() if line.startswith(("device", "native", "kernels"))]
    for line in lines:
        typer.echo(line)
    if not any(line.startswith("kernels") for line in lines):
        note("(nothing was compiled for a GPU: this command, or the first start, does that on a machine that has one)")
