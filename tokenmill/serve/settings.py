"""ServeSettings and HttpSettings: what a server may be told beyond the engine's own settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.config import command_defaults
from tokenmill.errors import ConfigError

MB = 1_000_000
LEAST_SECRET = 16  # characters
_QUEUE = command_defaults("serve")


@dataclass(frozen=True)
class ServeSettings:
    """Limits and patience of one service. Times are seconds."""

    max_queued_tokens: int = _QUEUE["max_queued_tokens"]  # prompt tokens that may wait for the engine
    max_queued_requests: int = _QUEUE["max_queued_requests"]
    hang_seconds: float = 60.0  # an engine that has work and completes no step for this long is restarted
    start_seconds: float = 600.0  # an engine that says nothing for this long while it loads is restarted
    beat_seconds: float = 0.25  # between two heartbeats of a busy engine
    backoff_seconds: float = 0.5  # before the second restart in a row; doubles up to backoff_most
    backoff_most: float = 30.0
    breaker_failures: int = 5  # this many engine failures ...
    breaker_window: float = 60.0  # ... within this time open the circuit breaker:
    breaker_seconds: float = 15.0  # new requests are refused for this long, then one is let in to see
    give_up_after: int = 8  # failures in a row without a single token: those who wait are told the cause
    lora_modules: tuple[tuple[str, str], ...] = ()  # adapters that are loaded before the first request: name, folder
    command: tuple[str, ...] = ()  # starts the engine process; empty: this Python, tokenmill.serve.engine.main

    def __post_init__(self) -> None:
        counts = ("max_queued_tokens", "max_queued_requests", "breaker_failures", "give_up_after")
        _check(self, counts, "a positive whole number", lambda value: isinstance(value, int) and value >= 1)
        seconds = ("hang_seconds", "start_seconds", "beat_seconds", "breaker_window", "breaker_seconds")
        _check(self, seconds, "a positive number of seconds", lambda value: value > 0)
        _check(self, ("backoff_seconds", "backoff_most"), "a number of seconds", lambda value: value >= 0)


@dataclass(frozen=True)
class HttpSettings:
    """Where a server listens, what it lets in and how patient it is. Times are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    names: tuple[str, ...] = ()  # what clients call the model; empty: its own name
    keys: Path | None = None  # the file of API keys; None: everybody may ask
    lora_dir: Path | None = None  # requests may load adapters from folders below it; None: requests load none
    journal: Path | None = None  # the file that remembers batches; None: they are forgotten with the process
    drain_seconds: float = 30.0  # how long a server that is told to stop waits for what runs
    max_body_bytes: int = 16 * MB
    body_seconds: float = 30.0  # from a request's head to the end of its body
    head_seconds: float = 20.0  # from the beginning of a connection or request to the end of its head
    idle_seconds: float = 75.0  # a connection without a request is closed after this
    write_seconds: float = 60.0  # a client that takes nothing of its answer for this long is dropped
    beat_seconds: float = 15.0  # silence of a stream after which a comment is sent, for the sake of proxies
    max_connections: int = 20_000
    origins: tuple[str, ...] = field(default=())  # web pages of these origins may ask; "*": of all
    hosts: tuple[str, ...] = ()  # names that a browser may know this server by; "*": any; empty: see `OriginGuard`
    max_stored_bytes: int = 1000 * MB  # files and batches of one tenant
    max_responses_bytes: int = 256 * MB  # stored responses of all tenants, in memory; 0: none are stored
    response_seconds: float = 24 * 3600.0  # a stored response is forgotten when nobody asked for it for this long
    max_sessions: int = 256  # that one tenant may have open
    max_session_tokens: int = 4_000_000  # of one tenant's sessions, in the memory of the HTTP process
    log_prompts: bool = False  # prompts and answers are written into the log
    otlp_endpoint: str | None = None  # a collector that is sent spans; None: nothing is traced
    cluster_secret: str | None = None  # what routers must know; None: whoever may ask at all may also be a router
    trace_ratio: float = 1.0  # of requests whose client does not say whether they are traced

    def __post_init__(self) -> None:
        _check(self, ("port",), "from 1 to 65535, or 0 for any free one", lambda value: 0 <= value < 65536)
        seconds = ("body_seconds", "head_seconds", "idle_seconds", "write_seconds", "beat_seconds", "response_seconds")
        _check(self, seconds, "above 0", lambda value: value > 0)
        _check(self, ("drain_seconds", "max_responses_bytes"), "0 or more", lambda value: value >= 0)
        counts = ("max_body_bytes", "max_connections", "max_stored_bytes", "max_sessions", "max_session_tokens")
        _check(self, counts, "1 or more", lambda value: value >= 1)
        _check(self, ("trace_ratio",), "from 0 to 1", lambda value: 0 <= value <= 1)
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; it must be an address such as http://localhost:4318"
            )


def read_secret(path: Path | None) -> str | None:
    """The secret that routers and replicas of a cluster share, from its file. Raises ConfigError."""
    if path is None:
        return None
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"the cluster's secret cannot be read from {path} ({why}); give a file of text") from None
    if len(secret) < LEAST_SECRET or not secret.isascii() or not secret.isprintable():
        raise ConfigError(
            f"the cluster's secret in {path} has {len(secret)} characters; it needs {LEAST_SECRET} or more, in one "
            "line of ASCII: openssl rand -hex 32 makes a good one"
        )
    return secret


def _check(settings: object, names: tuple[str, ...], wanted: str, fits: Callable[[float], bool]) -> None:
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise ConfigError(f"{name} is {value!r}; it must be {wanted}")
