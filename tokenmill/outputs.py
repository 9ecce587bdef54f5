"""What a user gets back: RequestOutput and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.engine.request import Metrics


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


LogprobTable = dict[int, Logprob]  # token id -> its log-probability, at one position


@dataclass
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobTable] | None = None
    finish_reason: str | None = None  # stop, length, cancelled, deadline, error; None while it runs
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for an end token


@dataclass
class RequestOutput:
    """A request, as far as it has come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: Metrics = field(default_factory=Metrics)
    prompt_logprobs: list[LogprobTable | None] | None = None  # one per prompt token; the first has none
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.cached_tokens
