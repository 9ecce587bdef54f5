"""`tokenmill route`: one address in front of many servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tokenmill.cli.options import option
from tokenmill.cli.terminal import note
from tokenmill.errors import ConfigError, pip_install
from tokenmill.serve.settings import MB, HttpSettings, read_secret

_NET = "Who may ask"
_WATCH = "What it tells"


def route(
    replica: Annotated[
        list[str] | None,
        option("Address of a `tokenmill serve`, as http://10.0.0.1:8000; give all of them."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        option("SERVER=REPLICA: long prompts for this replica are first read by that server (--kv-push-to)."),
    ] = None,
    prefill_tokens: Annotated[int, option("Prompts of which so many are not cached are long.", min=1)] = 512,
    policy: Annotated[str, option("cache, round-robin or least-loaded.")] = "cache",
    imbalance: Annotated[
        float, option("Seconds by which a replica's queue may be longer than the shortest, to be chosen at all.")
    ] = 5.0,
    seed: Annotated[int, option("Routers with the same seed and replicas send sessions to the same places.")] = 0,
    hang_seconds: Annotated[float, option("A replica that says nothing for this long is taken for dead.")] = 10.0,
    patience_seconds: Annotated[float, option("How long a request waits for a replica that takes it.")] = 60.0,
    drain_seconds: Annotated[float, option("How long SIGTERM waits for what runs.")] = HttpSettings.drain_seconds,
    max_body_mb: Annotated[float, option("Largest request.")] = HttpSettings.max_body_bytes / MB,
    host: Annotated[str, option("Address to listen at; 0.0.0.0: all.", panel=_NET)] = HttpSettings.host,
    port: Annotated[int, option("0: any free one.", panel=_NET)] = 8080,
    cluster_secret: Annotated[
        Path | None, option("File with the secret that the replicas were given, too.", panel=_NET)
    ] = None,
    log_format: Annotated[
        str | None, option("json or plain; unset: plain at a terminal.", panel=_WATCH, show_default=False)
    ] = None,
    log_level: Annotated[str, option("debug, info, warning or error.", panel=_WATCH)] = "info",
) -> None:
    """Route requests to the servers behind one address: where their prompt is cached, where the queue is short.

    A server that dies takes no answer along: streams go on elsewhere, without a gap.
    Ctrl-C or SIGTERM stops accepting, finishes what runs, and exits; a second one exits at once.
    """
    import asyncio

    try:
        from tokenmill.serve.observe.logs import set_up_logs
        from tokenmill.serve.router.server import route as run_router
        from tokenmill.serve.router.settings import RouterSettings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenmill"):
            raise
        raise ConfigError(f"routing needs the package {error.name}; {pip_install('serve')}") from None
    if log_format not in (None, "json", "plain"):
        raise ConfigError(f"--log-format is {log_format!r}; it must be json or plain")
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level is {log_level!r}; it must be debug, info, warning or error")
    if not replica:
        raise ConfigError("there is nothing to route to; name each server with --replica http://HOST:PORT")
    set_up_logs(log_format or ("plain" if sys.stderr.isatty() else "json"), log_level)
    http = HttpSettings(
        host=host,
        port=port,
        drain_seconds=drain_seconds,
        max_body_bytes=int(max_body_mb * MB),
        cluster_secret=read_secret(cluster_secret),
    )
    settings = RouterSettings(
        replicas=tuple(one.rstrip("/") for one in replica),
        http=http,
        prefill=tuple(_pair(one) for one in prefill or ()),
        prefill_tokens=prefill_tokens,
        policy=policy,
        seed=seed,
        imbalance=imbalance,
        hang_seconds=hang_seconds,
        patience_seconds=patience_seconds,
    )
    asyncio.run(run_router(settings, lambda url: note(f"tokenmill routes to {len(replica)} replicas at {url}")))


def _pair(text: str) -> tuple[str, str]:
    server, _, replica = text.partition("=")
    if not server or not replica:
        raise ConfigError(f"--prefill is {text!r}; it is written as http://READS:8002=http://ANSWERS:8001")
    return server.rstrip("/"), replica.rstrip("/")
