"""ServeSettings: what a server may be told beyond the engine's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config import command_defaults
from tokenmill.errors import ConfigError

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
    command: tuple[str, ...] = ()  # starts the engine process; empty: this Python, tokenmill.serve.engine.main

    def __post_init__(self) -> None:
        for name in ("max_queued_tokens", "max_queued_requests", "breaker_failures", "give_up_after"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a positive whole number")
        for name in ("hang_seconds", "start_seconds", "beat_seconds", "breaker_window", "breaker_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be a positive number of seconds")
        for name in ("backoff_seconds", "backoff_most"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds")
