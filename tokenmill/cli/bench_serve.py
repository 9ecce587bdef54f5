"""`tokenmill bench serve`: the command line of the load test."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.options import DEFAULT_MODEL, Device, Dtype, MaxModelLen, Model
from tokenmill.cli.terminal import note, progress
from tokenmill.errors import ConfigError


def serve(
    model: Model = DEFAULT_MODEL,
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server; unset: MODEL is served here.")] = None,
    name: Annotated[str | None, typer.Option(help="With --url: what that server calls the model.")] = None,
    key: Annotated[str | None, typer.Option(help="With --url: an API key.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Requests at once; ignored with --rate.")] = 64,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests in all; unset: one per stream.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second at random times, whether others end or not.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Words, nearly all one token, per prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Ask for every answer alone first, and compare word for word.")
    ] = False,
    against_offline: Annotated[
        bool, typer.Option("--against-offline", help="What HTTP costs against the offline API, in turns.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="With --against-offline: how often both have their turn.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds per request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Other prompts.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As of `tokenmill serve`.")] = None,
    load_format: Annotated[str, typer.Option(help="As of `tokenmill serve`.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON instead.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write every figure to this file (JSON).")] = None,
) -> None:
    """Put load on a server and print throughput, latencies and errors.

    The client is independent of the server: any OpenAI-compatible one can be asked with --url.
    """
    from tokenmill.bench.serve import Load, alone, compare, drive, started_server
    from tokenmill.bench.serve_client import Place, run
    from tokenmill.bench.serve_offline import overhead
    from tokenmill.bench.serve_table import figures, lines, overhead_figures, overhead_lines

    if url is not None and against_offline:
        raise ConfigError("--against-offline serves MODEL itself, so that both do the same work; leave --url out")
    if url is None and (name is not None or key is not None):
        raise ConfigError("--name and --key are for a server that runs already; name it with --url")
    count = requests or streams
    load = Load(
        requests=count,
        streams=count if rate is not None else min(streams, count),
        rate=rate,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        model=name,
        ignore_eos=ignore_eos,
        timeout=timeout,
        seed=seed,
    )
    chosen = {"device": device, "dtype": dtype, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    options: dict[str, Any] = {option: value for option, value in chosen.items() if value is not None}
    options["load_format"] = load_format
    found: dict[str, Any] = {}
    told: list[str] = []
    with progress() as report:
        if against_offline:
            measured = overhead(model, options, load, rounds, report)
            found["overhead"] = overhead_figures(measured)
            told = list(overhead_lines(measured))
        else:
            with ExitStack() as stack:
                place = Place(url or stack.enter_context(started_server(model, options)), key)

                async def measure() -> Any:
                    expected = await alone(place, load, report) if check else None
                    result = await drive(place, load, report)
                    if expected is not None:
                        result.check = compare(result.answers, expected)
                    return result

                found = figures(load, run(measure()))
                told = list(lines(found))
    text = json.dumps(found, indent=1)
    typer.echo(text if as_json else "\n".join(told))
    if out is not None:
        out.write_text(text + "\n")
        note(f"wrote {out}")
    if not against_offline and (found["errors"] or (check and found["check"]["equal"] != count)):
        raise typer.Exit(1)
