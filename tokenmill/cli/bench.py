"""`tokenmill bench`: throughput and latencies, offline and served, and what ops and steps cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.bench_cpu import cpu
from tokenmill.cli.bench_offline import latency, offline
from tokenmill.cli.bench_serve import serve
from tokenmill.cli.engine_options import ALL_OPTIONS, EngineSettings, with_engine_options
from tokenmill.cli.options import DEFAULT_MODEL, CacheDir, Device, Dtype, Model, option
from tokenmill.cli.settings_file import CommandWithFile
from tokenmill.cli.terminal import check_writable, progress
from tokenmill.config import EngineConfig, command_defaults

bench = typer.Typer(no_args_is_help=True, help="Measure a model, a server, ops and steps on this machine.")
for command in (offline, latency, serve):
    bench.command(cls=CommandWithFile, epilog=ALL_OPTIONS)(command)
bench.command()(cpu)


@bench.command()
def ops(model: Model = DEFAULT_MODEL, device: Device = None, dtype: Dtype = None, cache_dir: CacheDir = None) -> None:
    """Time every op at the model's shapes, against this machine's measured ceilings. Reads only the model's config."""
    from tokenmill.bench.ops import bench_ops
    from tokenmill.engine.checkpoints import open_checkpoint
    from tokenmill.engine.choices import choose_device, choose_dtype
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.source import resolve

    with progress() as report:
        files = resolve(model, progress=report)
    spec = spec_from_config(open_checkpoint(EngineConfig(model=model, load_format="dummy"), files)[1])
    where = choose_device(device or "auto")
    bench_ops(spec, where, choose_dtype(dtype or "auto", spec, where)[0], typer.echo)


@bench.command(cls=CommandWithFile, epilog=ALL_OPTIONS)
@with_engine_options("bench trace")
def trace(
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path, option("Folder for decode.json, mixed.json and their pictures.")] = Path("traces"),
    rows: Annotated[int, option("Requests that decode.", min=1)] = 8,
    context: Annotated[int, option("Tokens each of them has.", min=1)] = 128,
    dummy: Annotated[bool, option("Random weights: only the model's config is read.", "--dummy")] = False,
    *,
    engine: EngineSettings,
) -> None:
    """Write Chrome traces and pictures of decode steps, and of steps that take in a new prompt beside them."""
    check_writable(folder=out)
    settings = {**command_defaults("bench trace", max_num_seqs=rows + 1, max_model_len=context + 65), **engine}
    if dummy:
        settings["load_format"] = "dummy"
    EngineConfig.from_options(model=model, **settings)  # what is wrong is told before torch is imported
    from tokenmill import LLM
    from tokenmill.bench.trace import record

    with progress() as report, LLM(model, progress=report, **settings) as llm:
        for path in record(llm, out, rows=rows, context=context):
            typer.echo(f"wrote {path}")
