"""HttpSettings: what the HTTP side of a server may be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.errors import ConfigError

MB = 1_000_000


@dataclass(frozen=True)
class HttpSettings:
    """Where a server listens, what it lets in and how patient it is. Times are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    names: tuple[str, ...] = ()  # what clients call the model; empty: its own name
    keys: Path | None = None  # the file of API keys; None: everybody may ask
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
    log_prompts: bool = False  # prompts and answers are written into the log
    otlp_endpoint: str | None = None  # a collector that is sent spans; None: nothing is traced
    trace_ratio: float = 1.0  # of requests whose client does not say whether they are traced

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be from 1 to 65535, or 0 for any free one")
        above_zero = (
            "body_seconds",
            "head_seconds",
            "idle_seconds",
            "write_seconds",
            "beat_seconds",
            "response_seconds",
        )
        for name in above_zero:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not self.drain_seconds >= 0:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; it must be an address such as http://localhost:4318"
            )
        if not 0 <= self.trace_ratio <= 1:
            raise ConfigError(f"trace_ratio is {self.trace_ratio}; it must be from 0 to 1")
        for name in ("max_body_bytes", "max_connections", "max_stored_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.max_responses_bytes < 0:
            raise ConfigError(f"max_responses_bytes is {self.max_responses_bytes}; it must be 0 or more")
