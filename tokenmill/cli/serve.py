"""`tokenmill serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.terminal import note, progress
from tokenmill.config import LOAD, OPTIONS, EngineConfig, command_defaults
from tokenmill.errors import ConfigError, pip_install
from tokenmill.serve.settings import MB, HttpSettings, ServeSettings

_NET = "Who may ask"
_WATCH = "What it tells"
HOUR = 3600.0  # seconds
EVERY = 5.0  # seconds between two lines of a log that say how far a start is


@with_engine_options("serve", show=None)
def serve(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all.", rich_help_panel=_NET)
    ] = HttpSettings.host,
    port: Annotated[int, typer.Option(help="0: any free one.", rich_help_panel=_NET)] = HttpSettings.port,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys (see `tokenmill keys`).", rich_help_panel=_NET)
    ] = None,
    origin: Annotated[
        list[str] | None, typer.Option(help="Web pages of this origin may ask; * for all.", rich_help_panel=_NET)
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that browsers may know this server by; * for any.", rich_help_panel=_NET),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="File that remembers batches over a restart.", rich_help_panel=LOAD)
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given several times.")
    ] = None,
    degrade: Annotated[
        str | None, typer.Option(help="A smaller MODEL that answers while the first one cannot.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long SIGTERM waits for what runs.", rich_help_panel=LOAD)
    ] = HttpSettings.drain_seconds,
    hang_seconds: Annotated[
        float, typer.Option(help="An engine without progress for this long is restarted.", rich_help_panel=LOAD)
    ] = ServeSettings.hang_seconds,
    max_body_mb: Annotated[
        float, typer.Option(help="Largest request.", rich_help_panel=LOAD)
    ] = HttpSettings.max_body_bytes / MB,
    max_stored_mb: Annotated[
        float, typer.Option(help="Files and batches that one tenant may keep.", rich_help_panel=LOAD)
    ] = HttpSettings.max_stored_bytes / MB,
    max_responses_mb: Annotated[
        float, typer.Option(help="Stored responses of everybody, in memory; 0: none.", rich_help_panel=LOAD)
    ] = HttpSettings.max_responses_bytes / MB,
    response_hours: Annotated[
        float, typer.Option(help="A stored response is forgotten when unused for this long.", rich_help_panel=LOAD)
    ] = HttpSettings.response_seconds / HOUR,
    log_format: Annotated[
        str | None,
        typer.Option(help="json or plain; unset: plain at a terminal.", show_default=False, rich_help_panel=_WATCH),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_WATCH)] = "info",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and answers into the log.", rich_help_panel=_WATCH)
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector for traces, as http://localhost:4318.", rich_help_panel=_WATCH),
    ] = None,
    trace_ratio: Annotated[
        float, typer.Option(help="Share of requests traced, where the client does not say.", rich_help_panel=_WATCH)
    ] = HttpSettings.trace_ratio,
    *,
    engine: EngineSettings,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's and Anthropic's API.

    Ctrl-C or SIGTERM stops accepting, finishes what runs, and exits; a second one exits at once.
    """
    import asyncio  # 25 ms, which --help of other commands need not wait for

    try:
        from tokenmill.serve.engine_client.service import Service
        from tokenmill.serve.observe.logs import set_up_logs
        from tokenmill.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenmill"):
            raise
        raise ConfigError(f"serving needs the package {error.name}; {pip_install('serve')}") from None
    if log_format not in (None, "json", "plain"):
        raise ConfigError(f"--log-format is {log_format!r}; it must be json or plain")
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level is {log_level!r}; it must be debug, info, warning or error")
    set_up_logs(log_format or ("plain" if sys.stderr.isatty() else "json"), log_level)
    chosen = {**command_defaults("serve"), **engine}
    config = EngineConfig.from_options(model=model, **chosen)
    http = HttpSettings(
        host=host,
        port=port,
        keys=keys,
        journal=journal,
        names=tuple(name or ()),
        drain_seconds=drain_seconds,
        max_body_bytes=int(max_body_mb * MB),
        origins=tuple(origin or ()),
        hosts=tuple(allowed_host or ()),
        max_stored_bytes=int(max_stored_mb * MB),
        max_responses_bytes=int(max_responses_mb * MB),
        response_seconds=response_hours * HOUR,
        log_prompts=log_prompts,
        otlp_endpoint=otlp_endpoint,
        trace_ratio=trace_ratio,
    )
    settings = ServeSettings(
        max_queued_tokens=config.max_queued_tokens,
        max_queued_requests=config.max_queued_requests,
        hang_seconds=hang_seconds,
    )

    async def main() -> None:
        second = None
        if degrade is not None:
            alike = {name: value for name, value in chosen.items() if name not in ("load_format", "quantization")}
            second = Service(EngineConfig.from_options(model=degrade, **alike), settings)
        service = Service(config, settings, second)
        with ExitStack() as stack:
            report = stack.enter_context(progress(every=EVERY))

            def on_ready(url: str) -> None:
                stack.close()
                for line in service.facts.report:
                    note(line)
                note(queue_line(config))
                note(f"tokenmill serves {service.facts.model} at {url}")

            await run_server(service, http, report, on_ready)

    asyncio.run(main())


def queue_line(config: EngineConfig) -> str:
    """How much may wait, and why that much where nothing was said."""
    usual = command_defaults("serve")
    names = [name for name in usual if getattr(config, name) == usual[name]]
    whys = {OPTIONS[name].by_command["serve"].why for name in names}
    reason = f" ({'; '.join(sorted(whys))})" if whys else ""
    most = f"{config.max_queued_tokens:,} prompt tokens and {config.max_queued_requests:,} requests may wait"
    return f"queue        {most}; more get 429{reason}"
