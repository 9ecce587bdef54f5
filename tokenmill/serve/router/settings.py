"""RouterSettings: which replicas there are, how one is chosen, and how patient the router is."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tokenmill.errors import ConfigError
from tokenmill.routing.routers import POLICIES
from tokenmill.serve.settings import HttpSettings


@dataclass(frozen=True)
class RouterSettings:
    """Times are seconds."""

    replicas: tuple[str, ...]  # addresses, as http://10.0.0.1:8000
    http: HttpSettings = field(default_factory=HttpSettings)  # where the router itself listens
    prefill: tuple[tuple[str, str], ...] = ()  # (server that reads prompts, replica that it pushes keys and values to)
    prefill_tokens: int = 512  # a prompt of which at least so many are not cached is read there first
    policy: str = "cache"
    seed: int = 0  # routers with the same seed and replicas send sessions to the same places
    imbalance: float = 5.0  # a replica whose queue is longer than the shortest by more than this gets nothing
    hang_seconds: float = 10.0  # a replica that says nothing for this long is taken for dead
    connect_seconds: float = 1.5  # long enough for a first packet that was lost
    probe_seconds: float = 2.0  # for the identities of a prompt; then it is sent without
    patience_seconds: float = 60.0  # how long an accepted request waits for a replica that takes it

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy is {self.policy!r}; it may be one of {', '.join(POLICIES)}")
        for name in ("hang_seconds", "connect_seconds", "probe_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("imbalance", "patience_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for address in self.replicas:
            address_of(address)
        for worker, replica in self.prefill:
            address_of(worker)
            if replica not in self.replicas:
                raise ConfigError(f"{worker} reads prompts for {replica}, which is no --replica; name it as one, too")
        if len(set(self.replicas)) < len(self.replicas):
            raise ConfigError("a replica is named twice; name each address once")


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a replica. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"the replica {url[:200]!r} is no address of a server; write it as http://10.0.0.1:8000")
    return host, port or 80
