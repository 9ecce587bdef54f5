"""`tokenmill warm`: do ahead what a first start would take its time for."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.terminal import note, progress
from tokenmill.config import LOAD, WHERE, EngineConfig, command_defaults


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
