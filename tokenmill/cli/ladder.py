"""`tokenmill ladder`: what each technique is worth on this machine, one rung at a time, and what it does to answers."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import bench_options as given
from tokenmill.cli.options import DEFAULT_MODEL, MODEL_HELP, CacheDir, Device, Dtype, LoadFormat, option
from tokenmill.cli.terminal import note, progress

if TYPE_CHECKING:
    from tokenmill.bench.ladder import LadderPlan
    from tokenmill.bench.ladder_run import RungResult
    from tokenmill.model.spec import DecoderSpec
    from tokenmill.plan.demand.workload import Workload

_WHAT = "What is asked"
# By device: small enough that the bottom rung ends within a minute.
USUAL = {"cpu": (32, 96, 32), "cuda": (64, 512, 128)}  # requests, tokens of prompts, of answers


def ladder(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    rungs: Annotated[str | None, option("Only these: kv-cache,paging. `--rungs list` names them.")] = None,
    requests: Annotated[int | None, option("How many; unset: 32, GPU 64.", panel=_WHAT, min=1)] = None,
    input: Annotated[
        int | None, option("Tokens per prompt on average; unset: 96, GPU 512.", panel=_WHAT, min=4)
    ] = None,
    output: Annotated[
        int | None, option("Tokens per answer on average; unset: 32, GPU 128.", panel=_WHAT, min=1)
    ] = None,
    seed: given.Seed = 0,
    seconds: Annotated[
        float, option("After so long a rung begins no further request; the table says how many ran.", min=0.1)
    ] = 45.0,
    repeats: Annotated[int, option("Runs of each batched rung, of which the median counts.", min=1)] = 1,
    html: Annotated[Path | None, option("One page with everything.")] = None,
    json: given.Json = None,
    plot: given.Plot = None,
    device: Device = None,
    dtype: Dtype = None,
    load_format: LoadFormat = None,
    cache_dir: CacheDir = None,
) -> None:
    """Climb from no KV cache and one request at a time to all techniques, on the same requests.

    Every rung is the one below plus one switch, in an engine of its own; its answers are held against the bottom's.
    """
    from tokenmill.bench.ladder_run import climb
    from tokenmill.bench.ladder_show import lines, page, waterfall
    from tokenmill.bench.workloads import Mix

    given.check_targets(json, plot, html)
    typed = {"device": device, "dtype": dtype, "load_format": load_format, "cache_dir": cache_dir}
    options: dict[str, Any] = {name: value for name, value in typed.items() if value is not None}
    options["skip_tokenizer_init"] = load_format == "dummy"
    with progress() as report:
        plan, work, vocab, used = _planned(model, options, (requests, input, output), seed, report)
        chosen = plan.chosen(None if rungs == "list" else rungs)
        if rungs == "list":
            for rung in chosen:
                typer.echo(f"{rung.name:<16} {rung.told}")
            return
        mix = Mix(work, vocab=vocab if load_format == "dummy" else None)
        asks = [(ask.prompt, ask.max_tokens) for ask in mix.asks(seed)]
        warm = [(ask.prompt, ask.max_tokens) for ask in mix.asks(~seed)]
        told = [_told(plan, work, used)]

        def data(rows: list[RungResult]) -> dict[str, Any]:
            return {"model": model, "told": told, "workload": work.summary(), "rungs": [row.as_data() for row in rows]}

        def keep(rows: list[RungResult]) -> None:  # a run that is cut short is not lost
            if json is not None and json != given.STDOUT:
                json.write_text(dumps(data(rows), indent=1) + "\n")

        rows = climb(
            model, plan, chosen, asks, warm, limit=seconds, repeats=repeats, dtype=used, report=report, keep=keep
        )
    title = f"The ladder: {_name(model)} on {_machine(plan.device)}"
    given.give_out(data(rows), [title, *told, "", *lines(rows)], json)
    if plot is not None:
        plot.mkdir(parents=True, exist_ok=True)
        target = plot / f"ladder_{plan.device}.svg"
        target.write_text(waterfall(title, rows))
        note(f"wrote {target}")
    if html is not None:
        html.write_text(page(title, told, rows, [plan.settings(row.rung.name) for row in rows]))
        note(f"wrote {html}")
    if any(row.error is not None or (row.exactness.different and not plan.rounds(row.rung.name)) for row in rows):
        raise typer.Exit(1)


def _planned(
    model: str, options: dict[str, Any], sizes: tuple[int | None, int | None, int | None], seed: int, report: Any
) -> tuple[LadderPlan, Workload, int, str]:
    """The ladder for this model and machine, the requests, the vocabulary's size, and the dtype's name."""
    from tokenmill.bench.ladder import LadderPlan, fitted, requests
    from tokenmill.config import EngineConfig
    from tokenmill.engine.checkpoints import open_checkpoint
    from tokenmill.engine.choices import choose_device, choose_dtype
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.checkpoint import BlockCheckpoint
    from tokenmill.model.weights.source import resolve

    config = EngineConfig.from_options(model=model, **options)
    device = choose_device(config.device)
    checkpoint, model_config = open_checkpoint(config, resolve(model, progress=report))
    spec = spec_from_config(model_config)
    dtype = choose_dtype(config.dtype, spec, device)[0]
    count, prompt, output = (one or usual for one, usual in zip(sizes, USUAL[device.type]))
    work = requests(count, prompt, output, seed)
    fits = fitted(work, device.type, spec.kv_bytes_per_token(dtype.itemsize), spec.max_positions)
    away = _away(spec)
    plan = LadderPlan(device.type, fits, isinstance(checkpoint, BlockCheckpoint), options, away, spec.moe is not None)
    return plan, work, spec.vocab_size, str(dtype).removeprefix("torch.")


def _away(spec: DecoderSpec) -> int:
    """Bytes: a third of what layers take at a byte each, or half of the experts; of a model with few layers none."""
    from tokenmill.plan.solve.offload import BUFFERS

    if spec.num_layers < 2 * BUFFERS:
        return 0
    params = [(name, one) for name, one in spec.parameters().items() if name.startswith("layers.")]
    experts = sum(one.numel for _, one in params if one.kind == "experts")
    return experts // 2 or sum(one.numel for _, one in params) // 3


def _told(plan: LadderPlan, work: Workload, dtype: str) -> str:
    return (
        f"{len(work)} requests, all there from the start: prompts of {min(work.prompts)} to {max(work.prompts)} tokens "
        f"that share their first {work.hash_block}, answers of {min(work.outputs)} to {max(work.outputs)}; greedy, "
        f"{dtype}. The KV cache may take {plan.sizes.kv_bytes / 1e6:,.0f} MB on every rung but those that change that."
    )


def _name(model: str) -> str:
    return "the default model" if model == DEFAULT_MODEL else Path(model).name


def _machine(device: str) -> str:
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"
