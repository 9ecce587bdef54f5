"""`tokenmill plan`: which settings a workload needs on some GPUs, and why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import EVERY, check_writable, note, progress
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.model.weights.source import ModelFiles
    from tokenmill.plan.demand.workload import Workload
    from tokenmill.plan.planner.candidates import Fleet
    from tokenmill.plan.planner.precision import WeightPrecision
    from tokenmill.plan.solve.shape import ModelShape

_WORK = "What is asked"
_OUT = "What comes out"


def plan(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    gpu: Annotated[str | None, option("h200x8, l4, ... unset: this machine, measured for a minute.")] = None,
    workload: Annotated[Path | None, option("Azure CSV, Mooncake JSONL or ShareGPT JSON.", panel=_WORK)] = None,
    requests: Annotated[str, option("Without a trace: prompt x answer tokens.", panel=_WORK)] = "1024x256",
    rate: Annotated[
        float | None, option("Requests per second; unset: as in the trace, else all at once.", panel=_WORK)
    ] = None,
    slo: Annotated[str | None, option("Promises: ttft=500ms,itl=50ms,p=90.", panel=_WORK)] = None,
    quality: Annotated[
        str, option("exact: as saved; near: fp8 and int8, too; any: int4 and w8a8, too.", panel=_WORK)
    ] = "near",
    speculation: Annotated[
        str | None, option("ACCEPTANCE:DRAFTS, how often a draft holds and how many there are: 0.8:4.", panel=_WORK)
    ] = None,
    max_model_len: options.MaxModelLen = None,
    price: Annotated[str | None, option("Of one GPU: 3.5/h.", panel=_WORK)] = None,
    available: Annotated[bool, option("Only what this version can run: one GPU per copy.", "--available")] = False,
    calibrate: Annotated[bool, option("Measure this machine again, though it was before.", "--calibrate")] = False,
    apply: Annotated[Path | None, option("Write the settings for `serve --config` (.toml, .json).", panel=_OUT)] = None,
    as_json: Annotated[bool, option("For programs.", "--json", panel=_OUT)] = False,
    cache_dir: options.CacheDir = None,
) -> None:
    """Choose precision, division over GPUs, batch and step sizes for a workload, with reasons and runners-up.

    Reads the model's config and how its weights are stored. Without --gpu it runs the model here to see how fast it is.
    """
    from tokenmill.bench.cost import parse_price
    from tokenmill.engine.speculation.proposer import MAX_DRAFTS
    from tokenmill.plan.demand.slo import parse_slo
    from tokenmill.plan.planner.configfile import ConfigFile, engine_settings, write_config
    from tokenmill.plan.planner.explain import as_data, explain
    from tokenmill.plan.planner.precision import QUALITIES
    from tokenmill.plan.planner.search import PlanRequest
    from tokenmill.plan.planner.search import plan as make_plan
    from tokenmill.plan.solve.drafts import parse_drafts

    if quality not in QUALITIES:
        raise ConfigError(f"--quality is {quality!r}; it must be {', '.join(QUALITIES)}")
    if max_model_len is not None and max_model_len < 1:
        raise ConfigError(f"--max-model-len is {max_model_len}; it must be 1 or more, or unset")
    check_writable(apply)
    drafts = parse_drafts(speculation, MAX_DRAFTS)
    promise, work, cost = parse_slo(slo), _workload(workload, requests, rate), parse_price(price)
    shape, fleet = _fleet(model, gpu, available, calibrate)
    found = make_plan(PlanRequest(shape, fleet, work, promise, quality, cost, max_model_len, drafts))
    if as_json:
        typer.echo(json.dumps(as_data(found), indent=2))
    else:
        typer.echo("\n".join(explain(found)))
    if apply is not None:
        settings, notes = engine_settings(found, model)
        write_config(apply, ConfigFile(settings))
        for line in notes:
            note(line)
        note(f"wrote {apply}; tokenmill serve --config {apply}")


def _workload(path: Path | None, requests: str, rate: float | None) -> Workload:
    from tokenmill.plan.demand.traces import read_trace
    from tokenmill.plan.demand.workload import fixed

    if rate is not None and not rate > 0:
        raise ConfigError(f"--rate is {rate}; it must be above 0")
    if path is not None:
        return read_trace(path, rate=rate)
    prompt, _, answer = requests.partition("x")
    if not (prompt.isdigit() and answer.isdigit() and int(prompt) and int(answer)):
        raise ConfigError(f"--requests is {requests!r}; it is written as 1024x256")
    return fixed(f"requests of {requests}", 1000, int(prompt), int(answer), math.inf if rate is None else rate)


def _fleet(model: str, gpu: str | None, available: bool, again: bool) -> tuple[ModelShape, Fleet]:
    """The model's counts, and the machines: by their figures, or this one by measurement."""
    from tokenmill.config import EngineConfig
    from tokenmill.engine.choices import choose_device, hardware_of
    from tokenmill.model.weights.source import resolve
    from tokenmill.plan.planner.calibrate import calibrate
    from tokenmill.plan.planner.candidates import GpuFleet, LocalFleet
    from tokenmill.plan.solve.gpus import parse_gpus

    machines = None if gpu is None else parse_gpus(gpu)
    with progress() as report:
        files = resolve(model, progress=report)
    shape, stored, floats = _opened(model, files)
    if machines is not None:
        kind, count = machines
        return shape, GpuFleet(kind, count, divide=not available, stored=stored, floats=floats)
    dummy = files.kind == "directory" and stored is None
    config = EngineConfig(model=model, load_format="dummy" if dummy else "auto")
    with progress(every=EVERY) as report:
        found = calibrate(replace(config, skip_tokenizer_init=True), report, again=again)
    note(f"measured     {len(found.points)} steps of this machine; the fit is off by {found.worst:.0%} at most")
    return shape, LocalFleet(found.step_time(shape), found.sizes, hardware_of(choose_device(config.device)))


def _opened(model: str, files: ModelFiles) -> tuple[ModelShape, WeightPrecision | None, str]:
    """The model's counts, what it stores if it is quantized, and what is to be said of its floats."""
    import torch

    from tokenmill.config import EngineConfig
    from tokenmill.engine.checkpoints import open_checkpoint
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.load import stored_forms
    from tokenmill.plan.planner.precision import stored_precision
    from tokenmill.plan.solve.shape import shape_of

    folder = files.kind == "directory"
    there = not folder or any(Path(files.path).glob("*.safetensors"))  # a config.json is enough for a plan
    config = EngineConfig(model=model, load_format="auto" if there else "dummy")
    checkpoint, settings = open_checkpoint(config, files)
    spec = spec_from_config(settings)
    shape = shape_of(spec, files.name)
    if not folder:
        return shape, None, "the blocks of a GGUF file become floats on a GPU"
    if checkpoint is None:
        unread = "config.json says that it is quantized, but its weights are not there: planned for plain floats"
        return shape, None, unread if settings.get("quantization_config") else ""
    dtype = torch.float16 if shape.saved_dtype == "float16" else torch.bfloat16
    return shape, stored_precision(spec, stored_forms(spec, checkpoint), dtype), ""
