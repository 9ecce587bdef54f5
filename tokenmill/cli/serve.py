"""`tokenmill serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.engine_options import EngineSettings, with_engine_options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import EVERY, note, progress
from tokenmill.config import LOAD, OPTIONS, EngineConfig, command_defaults
from tokenmill.errors import ConfigError, pip_install
from tokenmill.serve.settings import MB, HttpSettings, ServeSettings, read_secret

_NET = "Who may ask"
_WATCH = "What it tells"
_MANY = "Many replicas"
HOUR = 3600.0  # seconds


@with_engine_options("serve", show=None)
def serve(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    host: Annotated[str, option("Address to listen at; 0.0.0.0: all.", panel=_NET)] = HttpSettings.host,
    port: Annotated[int, option("0: any free one.", panel=_NET)] = HttpSettings.port,
    keys: Annotated[Path | None, option("File of API keys (see `tokenmill keys`).", panel=_NET)] = None,
    cluster_secret: Annotated[
        Path | None, option("File with the secret that routers must know (see `tokenmill route`).", panel=_NET)
    ] = None,
    origin: Annotated[list[str] | None, option("Web pages of this origin may ask; * for all.", panel=_NET)] = None,
    allowed_host: Annotated[
        list[str] | None, option("A name that browsers may know this server by; * for any.", panel=_NET)
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        option("With --enable-lora: NAME=FOLDER of an adapter; may be given several times.", panel=LOAD),
    ] = None,
    lora_dir: Annotated[
        Path | None, option("With --enable-lora: requests may load adapters from below this folder.", panel=LOAD)
    ] = None,
    journal: Annotated[Path | None, option("File that remembers batches over a restart.", panel=LOAD)] = None,
    name: Annotated[list[str] | None, option("What clients call the model; may be given several times.")] = None,
    degrade: Annotated[str | None, option("A smaller MODEL that answers while the first one cannot.")] = None,
    drain_seconds: Annotated[
        float, option("How long SIGTERM waits for what runs.", panel=LOAD)
    ] = HttpSettings.drain_seconds,
    hang_seconds: Annotated[
        float, option("An engine without progress for this long is restarted.", panel=LOAD)
    ] = ServeSettings.hang_seconds,
    max_body_mb: Annotated[float, option("Largest request.", panel=LOAD)] = HttpSettings.max_body_bytes / MB,
    max_stored_mb: Annotated[
        float, option("Files and batches that one tenant may keep.", panel=LOAD)
    ] = HttpSettings.max_stored_bytes / MB,
    max_responses_mb: Annotated[
        float, option("Stored responses of everybody, in memory; 0: none.", panel=LOAD)
    ] = HttpSettings.max_responses_bytes / MB,
    response_hours: Annotated[
        float, option("A stored response is forgotten when unused for this long.", panel=LOAD)
    ] = HttpSettings.response_seconds / HOUR,
    max_sessions: Annotated[
        int, option("Sessions of programs that one tenant may have open.", panel=LOAD)
    ] = HttpSettings.max_sessions,
    max_session_tokens: Annotated[
        int, option("Tokens that the sessions of one tenant may hold.", panel=LOAD)
    ] = HttpSettings.max_session_tokens,
    cluster: Annotated[
        str | None, option("Where to run replicas: local, auto, or a Ray cluster's address.", panel=_MANY)
    ] = None,
    replicas: Annotated[int, option("How many, where --cluster is given.", panel=_MANY)] = 1,
    autoscale: Annotated[
        str | None, option("LEAST:MOST:PER, replicas and requests per replica, such as 2:16:32.", panel=_MANY)
    ] = None,
    replica_cpus: Annotated[float, option("CPUs of one replica; local: its threads, 0: any.", panel=_MANY)] = 0,
    replica_gpus: Annotated[int, option("GPUs of one replica.", panel=_MANY)] = 0,
    log_format: Annotated[
        str | None, option("json or plain; unset: plain at a terminal.", panel=_WATCH, show_default=False)
    ] = None,
    log_level: Annotated[str, option("debug, info, warning or error.", panel=_WATCH)] = "info",
    log_prompts: Annotated[
        bool, option("Write prompts and answers into the log.", "--log-prompts", panel=_WATCH)
    ] = False,
    otlp_endpoint: Annotated[
        str | None, option("OpenTelemetry collector for traces, as http://localhost:4318.", panel=_WATCH)
    ] = None,
    trace_ratio: Annotated[
        float, option("Share of requests traced, where the client does not say.", panel=_WATCH)
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
        lora_dir=lora_dir,
        names=tuple(name or ()),
        drain_seconds=drain_seconds,
        max_body_bytes=int(max_body_mb * MB),
        origins=tuple(origin or ()),
        hosts=tuple(allowed_host or ()),
        max_stored_bytes=int(max_stored_mb * MB),
        max_responses_bytes=int(max_responses_mb * MB),
        response_seconds=response_hours * HOUR,
        max_sessions=max_sessions,
        max_session_tokens=max_session_tokens,
        log_prompts=log_prompts,
        otlp_endpoint=otlp_endpoint,
        trace_ratio=trace_ratio,
        cluster_secret=read_secret(cluster_secret),
    )
    settings = ServeSettings(
        max_queued_tokens=config.max_queued_tokens,
        max_queued_requests=config.max_queued_requests,
        hang_seconds=hang_seconds,
        lora_modules=_adapters(lora_modules or [], [model, *(name or ())]),
    )
    if not config.enable_lora and (lora_modules or lora_dir is not None):
        raise ConfigError("--lora-modules and --lora-dir are for a server with adapters; add --enable-lora")
    if lora_dir is not None and not lora_dir.is_dir():
        raise ConfigError(f"--lora-dir is {str(lora_dir)!r}, which is no folder; make it, or name another")

    if cluster is not None:
        if degrade is not None:
            raise ConfigError("--degrade is for one server; a cluster sends requests to another replica instead")
        from tokenmill.cli.serve_cluster import ClusterOptions, serve_cluster

        wanted = ClusterOptions(cluster, replicas, autoscale, replica_cpus, replica_gpus)
        asyncio.run(serve_cluster(wanted, config, http, settings, log_level))
        return
    many = {
        "replicas": replicas != 1,
        "autoscale": autoscale,
        "replica-cpus": replica_cpus,
        "replica-gpus": replica_gpus,
    }
    if (first := next((name for name, given in many.items() if given), None)) is not None:
        raise ConfigError(f"--{first} is for several replicas; say where they run, too, as in --cluster local")

    async def main() -> None:
        second = None
        if degrade is not None:
            own = ("load_format", "quantization", "enable_lora", "kv_listen", "kv_push_to")  # of the first model alone
            alike = {name: value for name, value in chosen.items() if name not in own}
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


def _adapters(modules: list[str], taken: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = [one.partition("=") for one in modules]
    for name, _, folder in pairs:
        if not name or not folder or [one for one, _, _ in pairs].count(name) > 1:
            raise ConfigError(f"--lora-modules is {'='.join((name, folder))!r}; it must be NAME=FOLDER, each name once")
        if name in taken:
            raise ConfigError(
                f"--lora-modules is {name}={folder}, and {name} is the model; give the adapter another name"
            )
    return tuple((name, folder) for name, _, folder in pairs)


def queue_line(config: EngineConfig) -> str:
    """How much may wait, and why that much where nothing was said."""
    usual = command_defaults("serve")
    names = [name for name in usual if getattr(config, name) == usual[name]]
    whys = {OPTIONS[name].by_command["serve"].why for name in names}
    reason = f" ({'; '.join(sorted(whys))})" if whys else ""
    most = f"{config.max_queued_tokens:,} prompt tokens and {config.max_queued_requests:,} requests may wait"
    return f"queue        {most}; more get 429{reason}"
