"""`tokenmill models` and `tokenmill pull`: the models on this machine, removing one, and bringing one here."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import note, progress, size


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
