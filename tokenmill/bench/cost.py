"""Prices: what a million tokens cost on a machine that costs so much per hour."""

from __future__ import annotations

from typing import Any

from tokenmill.errors import ConfigError

HOUR = 3600.0
MILLION = 1e6


def parse_price(text: str | None) -> float | None:
    """Per hour, from "2.5/h" or "2.5"."""
    if text is None:
        return None
    try:
        price = float(text.strip().removesuffix("h").removesuffix("/").lstrip("$"))
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ConfigError(f"--price is {text!r}; it is written as 2.5/h")
    return price


def cost(price: float, found: dict[str, Any]) -> dict[str, float | None]:
    """What a million tokens cost at the measured throughput: prompt and answer together, and answers alone."""
    return {
        "price_per_hour": price,
        "per_million_tokens": _each(price, found["total_tokens_per_second"]),
        "per_million_output_tokens": _each(price, found["output_tokens_per_second"]),
    }


def _each(price: float, per_second: float) -> float | None:
    return price / HOUR / per_second * MILLION if per_second > 0 else None
