"""SamplingParams: everything a user may say about how one request's tokens are chosen."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from tokenmill.compat import did_you_mean
from tokenmill.errors import InvalidRequest
from tokenmill.sampling.structured import StructuredOutput, checked_structured

MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64
MAX_LENGTH = 2**31 - 1

T = TypeVar("T")


def _refuses_unknown_names(cls: type[T]) -> type[T]:
    """A dataclass whose constructor answers a misspelt name with the closest right one."""
    init = cls.__init__
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *values: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise InvalidRequest(f"there is no sampling parameter {name!r}; {did_you_mean(name, known)}")
        init(self, *values, **options)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_refuses_unknown_names
@dataclass
class SamplingParams:
    """How the tokens of one request are chosen.

    Filters apply in this order: penalties and bias, temperature, top_k, top_p, min_p.
    Tokens that tie with the last one kept are kept too, so the result does not depend on sort order.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int | None = None  # the same seed gives the same tokens whatever else is in the batch
    max_tokens: int | None = 16  # None: up to the model's length
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None  # sample this many, return the n of highest mean log-probability
    beam_width: int | None = None  # beam search of this width; temperature is ignored
    length_penalty: float = 1.0  # beams: score = sum of logprobs / generated length ** length_penalty
    early_stopping: bool = False  # beams: stop when n are finished instead of when no better one is possible
    logprobs: int | None = None  # of the chosen token and this many best ones, before penalties and temperature
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0  # of tokens from here on; what lies before may come from the prefix cache
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    structured: StructuredOutput | None = None  # the answer's form: {"json": schema}, {"regex": ...}, {"choice": [...]}
    detokenize: bool = True
    skip_special_tokens: bool = True
    bad_words_ids: list[list[int]] = field(default_factory=list)  # filled from bad_words by the tokenizer

    def __post_init__(self) -> None:
        self.check()

    @property
    def reads_history(self) -> bool:
        """Whether the choice of a token depends on the tokens before it, other than through the model."""
        return self.penalized or bool(self.bad_words_ids)

    @property
    def penalized(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def check(self) -> None:
        """Bring lists into one form and raise InvalidRequest for the first field that cannot be."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = _listed("stop", self.stop, "strings")
        self.stop_token_ids = _listed("stop_token_ids", self.stop_token_ids, "token ids")
        self.bad_words = _listed("bad_words", self.bad_words, "strings")
        self.bad_words_ids = _listed("bad_words_ids", self.bad_words_ids, "lists of token ids")
        if self.top_k == -1:
            self.top_k = 0
        self._check_numbers()
        self._check_lists()
        self.structured = checked_structured(self.structured)
        if self.structured and (self.beam_width or self.bad_words or self.bad_words_ids or self.min_tokens):
            raise InvalidRequest(
                "structured output cannot be combined with beam_width, bad_words or min_tokens, which may forbid the "
                "only token that fits; leave them unset"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def num_sequences(self) -> int:
        """How many sequences run for this request (not all of them need to be returned)."""
        return self.beam_width or self.best_of or self.n

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def stop_ids(self) -> list[int]:
        return self.stop_token_ids or []

    @property
    def shapes_logits(self) -> bool:
        """Whether anything beyond temperature and the filters touches the logits of this request."""
        return bool(self.penalized or self.logit_bias or self.bad_words_ids or self.min_tokens)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _whole("top_k", self.top_k, low=0, hint="0 or -1 turns it off")
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("length_penalty", self.length_penalty, low=-20.0, high=20.0)
        for name in ("include_stop_str_in_output", "ignore_eos", "early_stopping", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.seed is not None:
            _whole("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, low=1, hint="None means up to the model's length")
        most = min(self.max_tokens or MAX_LENGTH, MAX_LENGTH)
        _whole("min_tokens", self.min_tokens, low=0, high=most, hint="it cannot exceed max_tokens")
        _whole("n", self.n, low=1, high=128)
        if self.best_of is not None:
            _whole("best_of", self.best_of, low=self.n, high=128, hint="it must be at least n")
        if self.beam_width is not None:
            _whole("beam_width", self.beam_width, low=self.n, high=64, hint="it must be at least n")
            if self.shapes_logits or self.bad_words or self.best_of:
                raise InvalidRequest(
                    "beam search cannot be combined with penalties, logit_bias, bad_words, min_tokens or best_of; "
                    "leave them unset or leave beam_width unset"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, low=0, high=MAX_LOGPROBS)
        _whole("prompt_logprobs_start", self.prompt_logprobs_start, low=0)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest("prompt_logprobs_start is set without prompt_logprobs; set that, too")

    def _check_lists(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"stop contains {text!r}; each stop must be a non-empty string")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids to stop on ids")
        for token in self.stop_ids:
            _whole("stop_token_ids entry", token, low=0)
        if self.logit_bias is not None:
            self.logit_bias = _checked_bias(self.logit_bias)
        for word in self.bad_words or []:
            if not isinstance(word, str) or not word:
                raise InvalidRequest(f"bad_words contains {word!r}; each must be a non-empty string")
        for ids in self.bad_words_ids:
            if not isinstance(ids, list) or not ids:
                raise InvalidRequest(f"bad_words_ids contains {ids!r}; each must be a non-empty list of token ids")
            for token in ids:
                _whole("bad_words_ids entry", token, low=0)


def _listed(name: str, value: Any, content: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name} is {value!r}; it must be a list of {content}")
    return list(value)


def _checked_bias(bias: Any) -> dict[int, float]:
    """Keys may be numerals: that is how they arrive in JSON."""
    if not isinstance(bias, dict):
        raise InvalidRequest(f"logit_bias is {bias!r}; it must map token ids to numbers")
    checked = {}
    for token, value in bias.items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:
            token = int(token)
        _whole("logit_bias key", token, low=0)
        _number("logit_bias value", value, low=-100.0, high=100.0)
        checked[token] = float(value)
    return checked


def _number(name: str, value: Any, *, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN is not itself
        raise InvalidRequest(f"{name} is {value!r}; it must be a number from {low} to {high}")
    if value < low or value > high or (open_low and value == low):
        raise InvalidRequest(
            f"{name} is {value}; it must be {'above' if open_low else 'at least'} {low} and at most {high}"
        )


def _whole(name: str, value: Any, *, low: int, high: int | None = None, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise InvalidRequest(f"{name} is {value!r}; it must be a whole number {span}" + (f" ({hint})" if hint else ""))
