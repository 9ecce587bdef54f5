"""Slo: the latencies that clients are promised, and how they are written on a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.errors import ConfigError


@dataclass(frozen=True)
class Slo:
    """What a client is promised, in seconds, for this share of requests (TTFT) and of tokens (ITL)."""

    ttft: float = math.inf
    itl: float = math.inf
    share: float = 0.9

    @property
    def text(self) -> str:
        parts = [f"{name} {value * 1e3:g} ms" for name, value in (("TTFT", self.ttft), ("ITL", self.itl))]
        kept = [part for part, value in zip(parts, (self.ttft, self.itl)) if math.isfinite(value)]
        return f"{' and '.join(kept)} at p{self.share * 100:g}" if kept else "none"

    @property
    def promises(self) -> bool:
        return math.isfinite(min(self.ttft, self.itl))


NO_PROMISE = Slo()


def parse_slo(text: str | None) -> Slo:
    """From "ttft=500ms,itl=50ms,p=99"."""
    found: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, value = (one.strip() for one in part.partition("="))
        number = value.removesuffix("ms").removesuffix("s")
        try:
            amount = float(number) * (1e-3 if value.endswith("ms") else 1.0)
        except ValueError:
            amount = -1.0
        if name in ("ttft", "itl") and amount > 0 and value == number:
            raise ConfigError(f"--slo has {part.strip()!r}, which may be s or ms; write {name}={number}ms or {number}s")
        if name not in ("ttft", "itl", "p") or not amount > 0 or (name == "p" and not amount < 100):
            raise ConfigError(f"--slo has {part.strip()!r}; it is written as ttft=500ms,itl=50ms,p=90")
        found["share" if name == "p" else name] = amount / 100 if name == "p" else amount
    return Slo(**found)
