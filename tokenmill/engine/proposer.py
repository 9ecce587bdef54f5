"""Proposer: drafts for speculative decoding (n-gram lookup, a draft model, heads): how an answer may go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.engine.request import Request


class Proposer(Protocol):
    def propose(self, requests: Sequence[Request]) -> None:
        """Set `drafts` of requests that decode, before each step: tokens for the positions from `num_tokens` on.

        `num_tokens` counts tokens that launched steps will sample (`pending`) and that nobody on the host knows yet:
        whoever looks things up by the newest tokens has to guess these first, and leaves them out of `drafts`. The
        first `unsure` drafts only bridge what may have been accepted meanwhile; the rest is verified. A wrong guess
        costs time and changes nothing: a step's noise is keyed by position.
        """
        ...
