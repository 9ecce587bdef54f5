"""`tokenmill bench`: throughput and latencies, offline and served, and what ops and steps cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.bench_cpu import cpu
from tokenmill.cli.bench_offline import latency, offline
from tokenmill.cli.bench_serve import serve
from tokenmill.cli.options import DEFAULT_MODEL, CacheDir, Device, Dtype, KVCacheDtype, Model, Quantization
from tokenmill.cli.terminal import check_writable, progress

bench = typer.Typer(no_args_is_help=True, help="Measure a model, a server, ops and steps on this machine.")
bench.command()(offline)
bench.command()(latency)
bench.command()(serve)
bench.command()(cpu)


@bench.command()
def ops(model: Model = DEFAULT_MODEL, device: Device = None, dtype: Dtype = None, cache_dir: CacheDir = None) -> None:
    """Time every op at the model's shapes, against this machine's measured ceilings. Reads only the model's config."""
    from tokenmill.bench.ops import bench_ops
    from tokenmill.config import EngineConfig
    from tokenmill.engine.build import choose_device, choose_dtype, open_checkpoint
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.source import resolve

    with progress() as report:
        files = resolve(model, progress=report)
    spec = spec_from_config(open_checkpoint(EngineConfig(model=model, load_format="dummy"), files)[1])
    where = choose_device(device or "auto")
    bench_ops(spec, where, choose_dtype(dtype or "auto", spec, where)[0], typer.echo)


@bench.command()
def trace(
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(help="Folder for decode.json, mixed.json and their pictures.")] = Path("traces"),
    rows: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens each of them has.")] = 128,
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights: only the model's config is read.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    cache_dir: CacheDir = None,
) -> None:
    """Write Chrome traces and pictures of decode steps, and of steps that take in a new prompt beside them."""
    check_writable(folder=out)
    from tokenmill import LLM
    from tokenmill.bench.trace import record

    with (
        progress() as report,
        LLM(
            model,
            device=device or "auto",
            dtype=dtype or "auto",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype or "auto",
            load_format="dummy" if dummy else "auto",
            skip_tokenizer_init=True,
            max_num_seqs=rows + 1,
            max_model_len=context + 65,
            progress=report,
        ) as llm,
    ):
        for path in record(llm, out, rows=rows, context=context):
            typer.echo(f"wrote {path}")
