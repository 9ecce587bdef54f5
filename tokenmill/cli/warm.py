"""`tokenmill warm`: do ahead what a first start would take its time for."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.terminal import note, progress


def warm(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As of `tokenmill serve`.")] = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KVCacheDtype = None,
    load_format: Annotated[str | None, typer.Option(help="As of `tokenmill serve`.")] = None,
    cache_dir: options.CacheDir = None,
) -> None:
    """Get a MODEL ready to start quickly: download it, build the CPU library, compile the GPU's kernels.

    Which kernels there are follows from the model, the GPU and these options: give the ones it will be served with.
    For container images: all of it is kept in the cache folder (--cache-dir).
    """
    chosen = {
        "device": device,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "load_format": load_format,
    }
    with progress() as report:
        from tokenmill import LLM  # torch comes with it, so it waits until options are known to be good

        settings = {name: value for name, value in chosen.items() if value is not None}
        llm = LLM(model=model, skip_tokenizer_init=True, progress=report, **settings)
    try:
        lines = [line for line in llm.plan_lines() if line.startswith(("device", "native", "kernels"))]
    finally:
        llm.shutdown()
    for line in lines:
        typer.echo(line)
    if not any(line.startswith("kernels") for line in lines):
        note("(nothing was compiled for a GPU: this command, or the first start, does that on a machine that has one)")
