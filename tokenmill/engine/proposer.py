"""Proposer: whoever guesses how answers go on, so that several tokens of one are computed in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.engine.request import Request


class Proposer(Protocol):
    def propose(self, requests: Sequence[Request]) -> None:
        """Set `drafts` of requests that decode, before each step: tokens for the positions from `num_tokens` on.

        The first `unsure` of them only bridge what the host does not know yet; the rest is verified. A wrong guess
        costs time and changes nothing: a step's noise is keyed by position.
        """
        ...
