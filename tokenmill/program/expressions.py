"""What a program appends to its state: text, `gen`, `select`, turns of a chat, and sums of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams

DEFAULT_MAX_TOKENS = 128
MAX_CHOICES = 256


@dataclass(frozen=True)
class Gen:
    """The model goes on."""

    name: str | None
    params: SamplingParams


@dataclass(frozen=True)
class Select:
    """The likeliest of some texts."""

    name: str | None
    choices: tuple[str, ...]
    normalized: bool


@dataclass(frozen=True)
class Turn:
    """One message of a chat."""

    role: str
    content: Expression


Part = str | Gen | Select | Turn


class Expression:
    """Parts one after the other."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __add__(self, other: Any) -> Expression:
        return Expression(*self.parts, *expression(other).parts)

    def __radd__(self, other: Any) -> Expression:
        return Expression(*expression(other).parts, *self.parts)


def expression(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, str):
        return Expression(value)
    raise InvalidRequest(
        f"a program can append text, gen(...), select(...) and turns such as user(...), not {type(value).__name__}"
    )


def gen(
    name: str | None = None,
    *,
    max_tokens: int | None = DEFAULT_MAX_TOKENS,
    regex: str | None = None,
    json: Any = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    **sampling: Any,
) -> Expression:
    """The model goes on; `s[name]` is what it said. `regex`, `json` (a schema), `choices` and `grammar` give the answer
    a form; everything else is as of SamplingParams (temperature, top_p, stop, seed, logprobs, ...).
    """
    forms = {"regex": regex, "json": json, "choice": choices, "grammar": grammar}
    given = {kind: form for kind, form in forms.items() if form is not None}
    if given:
        sampling["structured"] = {kind: list(form) if kind == "choice" else form for kind, form in given.items()}
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    if params.n != 1 or params.best_of not in (None, 1) or params.beam_width or params.prompt_logprobs is not None:
        raise InvalidRequest("gen makes one answer: for several leave n, best_of and beam_width out and fork the state")
    return Expression(Gen(_checked_name(name), params))


def select(name: str | None = None, choices: Sequence[str] = (), *, normalized: bool = True) -> Expression:
    """The text of `choices` that the model finds likeliest here, by the log-probability of its tokens: their mean, or
    their sum where not `normalized`. `s[name]` is the text, `s.meta(name)["scores"]` has all of them.
    """
    if isinstance(choices, str) or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"select chooses between 1 and {MAX_CHOICES} texts, not {choices!r:.60}")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest(f"choices has {choice!r:.60}; each must be a text that is not empty")
    return Expression(Select(_checked_name(name), tuple(choices), normalized))


def system(content: Any) -> Expression:
    return Expression(Turn("system", expression(content)))


def user(content: Any) -> Expression:
    return Expression(Turn("user", expression(content)))


def assistant(content: Any) -> Expression:
    return Expression(Turn("assistant", expression(content)))


def _checked_name(name: Any) -> str | None:
    if name is None or (isinstance(name, str) and name):
        return name
    raise InvalidRequest(f"name is {name!r:.60}; it must be text that is not empty, such as 'answer'")
