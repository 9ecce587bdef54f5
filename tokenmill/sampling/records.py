"""What sampling says about a token beside the token itself; plain data."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token itself, its rank, and the best ones. A tuple, because between
    processes that travels without the names of its fields."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]  # (token, logprob), best first
