"""`tokenmill models`: the models on this machine, and removing one."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import note, size


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
