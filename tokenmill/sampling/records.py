"""What sampling says about a token beside the token itself; plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, its rank, and the best ones."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]  # (token, logprob), best first
