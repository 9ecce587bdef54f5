"""What a user gets back: RequestOutput and its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from tokenmill.engine.request import Metrics
from tokenmill.sampling.records import TokenLogprobs

MODEL_LENGTH = "max_model_len"


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 is the most likely token
    decoded_token: str | None = None


LogprobTable = dict[int, Logprob]  # token id -> its log-probability, at one position


class LogprobTables(Sequence[LogprobTable]):
    """A list of tables that are made when somebody first looks at them: there are hundreds of thousands of entries in
    the answers of a batch, and while it runs its steps would wait for them.
    """

    def __init__(self, decode: Callable[[int], str] | None) -> None:
        self._decode = decode  # the text of a token; None: entries have none
        self._records: list[TokenLogprobs] = []
        self._made: dict[int, LogprobTable] = {}
        self._length = 0

    def extend(self, records: list[TokenLogprobs]) -> None:
        """Only of the first one: so far as there are views, these stay as they are."""
        self._records += records
        self._length += len(records)

    def view(self) -> LogprobTables:
        """The tables so far. It shares them, and what is added later is not in it."""
        found = LogprobTables(self._decode)
        found._records, found._made, found._length = self._records, self._made, self._length
        return found

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> LogprobTable: ...
    @overload
    def __getitem__(self, index: slice) -> list[LogprobTable]: ...
    def __getitem__(self, index: int | slice) -> LogprobTable | list[LogprobTable]:
        places = range(self._length)[index]
        return self._table(places) if isinstance(places, int) else [self._table(place) for place in places]

    def __iter__(self) -> Iterator[LogprobTable]:
        return map(self._table, range(self._length))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | LogprobTables) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:  # copied or sent to another process, it is a plain list
        return list, (list(self),)

    def _table(self, place: int) -> LogprobTable:
        table = self._made.get(place)
        if table is None:
            table = self._made[place] = logprob_table(self._records[place], self._decode)
        return table


def logprob_table(one: TokenLogprobs, decode: Callable[[int], str] | None) -> LogprobTable:
    """The chosen token and the best ones, as people know it from other engines."""
    table = {
        token: Logprob(logprob, place, decode(token) if decode is not None else None)
        for place, (token, logprob) in enumerate(one.top, 1)
    }
    if one.token not in table:
        table[one.token] = Logprob(one.logprob, one.rank, decode(one.token) if decode is not None else None)
    return table


@dataclass
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[LogprobTable] | None = None
    finish_reason: str | None = None  # stop, length, cancelled, deadline, error; None while it runs
    # The stop string or stop token id that ended it, None for an end token; MODEL_LENGTH where `length` is the model's,
    # and max_tokens was more.
    stop_reason: str | int | None = None


@dataclass
class EmbeddingOutput:
    embedding: list[float]  # of unit length; empty where there is an error


@dataclass
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    error: str | None = None


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
        """Prompt tokens that were not computed, those of modules included."""
        return self.metrics.reused_tokens

    @property
    def num_module_tokens(self) -> int:
        return self.metrics.module_tokens
