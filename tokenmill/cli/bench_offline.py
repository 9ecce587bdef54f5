"""`tokenmill bench offline` and `tokenmill bench latency`: the command lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import bench_options as given
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.options import DEFAULT_MODEL, MODEL_HELP, option
from tokenmill.cli.terminal import note, progress
from tokenmill.config import LOAD, WHERE, EngineConfig, command_defaults
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill import LLM
    from tokenmill.bench.achieved import Roof

Model = Annotated[str, typer.Argument(help=MODEL_HELP)]


@with_engine_options("bench offline", show=(WHERE, LOAD))
def offline(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int | None, option("Requests in all; unset: 64, or the whole trace.", min=1)] = None,
    input: given.Input = 128,
    output: given.Output = 128,
    trace: given.Trace = None,
    longest_input: given.LongestInput = None,
    longest_output: given.LongestOutput = None,
    seed: given.Seed = 0,
    repeats: given.Repeats = 1,
    warmup: given.WarmUp = None,
    ceilings: given.Ceilings = True,
    price: given.Price = None,
    json: given.Json = None,
    plot: given.Plot = None,
    *,
    engine: EngineSettings,
) -> None:
    """Measure the throughput of LLM.generate: all requests are there from the start."""
    from tokenmill.bench.achieved import work_of
    from tokenmill.bench.charts import draw
    from tokenmill.bench.cost import cost, parse_price
    from tokenmill.bench.figures import of_point
    from tokenmill.bench.offline import generate, memory_of
    from tokenmill.bench.table import lines
    from tokenmill.bench.workloads import Mix

    given.check_targets(json, plot)
    per_hour = parse_price(price)
    wanted = requests or (None if trace else 64)
    work = given.workload(trace, wanted, input, output, longest_input, longest_output)
    options = {**command_defaults("bench offline", skip_tokenizer_init=_made_up(engine)), **engine}
    roof, llm = _opened(model, options, ceilings)
    with llm:
        mix = Mix(work, vocab=llm._processor.vocab_size)
        if warm := mix.warm_up(8 if warmup is None else warmup, seed):
            generate(llm, warm, show=False)
        found_runs = [generate(llm, mix.asks(seed + number), show=True) for number in range(repeats)]
        memory = memory_of(llm)
    runs = [run for run, _ in found_runs]
    found: dict[str, Any] = of_point(runs, apart=False)
    found["memory"] = memory
    if roof is not None:
        answers = [answer for run in runs for answer in run.good]
        whole = work_of(answers, sum(steps for _, steps in found_runs), roof.shape)
        found["achieved"] = roof.achieved(whole, found["seconds"])
    if per_hour is not None:
        found["cost"] = cost(per_hour, found)
    data = {"model": model, "workload": work.summary(), "options": options, "points": [found]}
    given.give_out(data, list(lines(found, f"all at once, {given.lengths(work)}")), json)
    if plot is not None:
        note(f"wrote {', '.join(map(str, draw(plot, [('offline', None, runs)], None)))}")
    if found["errors"]:
        raise typer.Exit(1)


@with_engine_options("bench latency", show=(WHERE, LOAD))
def latency(
    model: Model = DEFAULT_MODEL,
    batch: Annotated[str, option("Requests in a batch; several: 1,8,32.")] = "1",
    input: given.Input = 128,
    output: given.Output = 128,
    seed: given.Seed = 0,
    repeats: given.Repeats = 5,
    warmup: Annotated[int, option("Batches before, which do not count.", min=0)] = 1,
    draft_acceptance: given.DraftAcceptance = None,
    draft_tokens: given.DraftTokens = None,
    ceilings: given.Ceilings = True,
    price: given.Price = None,
    json: given.Json = None,
    plot: given.Plot = None,
    *,
    engine: EngineSettings,
) -> None:
    """Measure one batch at a time: first token, time per token, every step."""
    from tokenmill.bench import drafts
    from tokenmill.bench.charts import draw
    from tokenmill.bench.cost import cost, parse_price
    from tokenmill.bench.latency import MIN_TOKENS, figures, lines, repeated
    from tokenmill.bench.workloads import Mix
    from tokenmill.engine.choices import choose_device
    from tokenmill.engine.runner.torch_runner import ASYNC_DEVICES
    from tokenmill.engine.speculation.proposer import MAX_DRAFTS

    given.check_targets(json, plot)
    per_hour = parse_price(price)
    sizes = given.whole_numbers(batch, "batch")
    if output < MIN_TOKENS:
        raise ConfigError(f"--output is {output}; steps are timed between tokens, of which {MIN_TOKENS} are needed")
    if draft_tokens is not None and draft_acceptance is None:
        raise ConfigError("--draft-tokens says how many are drafted; say how often they are right: --draft-acceptance")
    length = 0 if draft_acceptance is None else draft_tokens or 4
    if length > MAX_DRAFTS:
        raise ConfigError(f"--draft-tokens is {length}; an engine verifies at most {MAX_DRAFTS} per step and request")
    derived = {"max_num_seqs": max(sizes) * (1 + length), "skip_tokenizer_init": _made_up(engine)}
    options = {**command_defaults("bench latency", **derived), **engine}
    if length and choose_device(options.get("device", "auto")).type in ASYNC_DEVICES:
        options.setdefault("speculation", "suffix")  # so that steps with drafts are recorded before the first one
    config = EngineConfig.from_options(model=model, **options)
    if length and (config.batching != "continuous" or not config.kv_cache):
        raise ConfigError("--draft-acceptance needs batching='continuous' and kv_cache=True; leave it out")
    rows = config.max_num_seqs
    if rows is not None and rows < max(sizes):
        raise ConfigError(f"max_num_seqs is {rows}; it must be {max(sizes)}, the largest --batch, or more")
    roof, llm = _opened(model, options, ceilings)
    points, drawn = [], []
    with llm, progress() as report:
        for number, size in enumerate(sizes):
            report(number, len(sizes), f"batch of {size}")
            mix = Mix(given.workload(None, size, input, output), vocab=llm._processor.vocab_size)
            if draft_acceptance is None:
                batches, drafted = repeated(llm, mix, seed, repeats, warmup), {}
            else:
                batches, found = drafts.repeated(llm, mix, seed, repeats, warmup, draft_acceptance, length)
                drafted = {"drafts": found}
            points.append(figures(batches, roof) | drafted)
            drawn.append((f"batch {size}", None, [one.run for one in batches]))
            if per_hour is not None:
                points[-1]["cost"] = cost(per_hour, points[-1])
    told = [f"prompts of {input} and answers of {output} tokens, {repeats} repeats", *lines(points)]
    if draft_acceptance is not None:
        told += drafts.lines(points)
    given.give_out({"model": model, "options": options, "points": points}, told, json)
    if plot is not None:
        note(f"wrote {', '.join(map(str, draw(plot, drawn, None)))}")


def _opened(model: str, options: dict[str, Any], ceilings: bool) -> tuple[Roof | None, LLM]:
    """The machine's best, measured before anything else uses it, and the model."""
    from tokenmill.bench.achieved import measure_roof

    with progress() as report:
        config = EngineConfig.from_options(model=model, **options)
        report(0, 0, "measuring what the machine can")
        roof = measure_roof(config) if ceilings else None
        from tokenmill import LLM

        return roof, LLM(model, progress=report, **options)


def _made_up(engine: EngineSettings) -> bool:
    """Whether there are no weights, and so perhaps no tokenizer; prompts are token ids."""
    return engine.get("load_format") == "dummy"
