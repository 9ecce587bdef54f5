"""`tokenmill pull`: bring a model to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.terminal import progress


def pull(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    cache_dir: options.CacheDir = None,
) -> None:
    """Download a MODEL, so that it starts without a network later."""
    from tokenmill.model.weights.source import resolve

    with progress() as report:
        files = resolve(model, progress=report)
    typer.echo(f"{files.name} is at {files.path}")
