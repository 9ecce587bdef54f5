"""StructuredOutput: what a user may say about the form of an answer, its limits, and its one normal form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict, cast

from tokenmill.errors import InvalidRequest

MAX_SCHEMA_BYTES = 128 << 10
MAX_SCHEMA_DEPTH = 64  # nested objects and arrays of the schema's own text
MAX_SCHEMA_VALUES = 20_000
MAX_NUMBER = 2**53  # schemas are compiled with 64-bit floating point numbers
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 64 << 10  # all of them together


class StructuredOutput(TypedDict, total=False):
    """Exactly one of these. The answer matches as a whole, and ends where nothing can follow."""

    json: Any  # a JSON schema: a dict, its text, or a class with `model_json_schema()`
    json_object: bool  # True: any JSON object
    regex: str  # Rust syntax: no look-around, no back-references
    grammar: str  # Lark, with a rule named `start`
    choice: list[str]  # one of these texts


def checked_structured(value: Any) -> StructuredOutput | None:
    """The same in normal form (a schema is its JSON text), so that what the user does with theirs changes nothing.

    Whether the schema, regex or grammar can be compiled is asked of `sampling/grammar.py`.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"structured is a {type(value).__name__}; it must be a dict with one of {_KINDS}")
    given = {name: content for name, content in value.items() if content is not None}
    if unknown := given.keys() - StructuredOutput.__annotations__.keys():
        raise InvalidRequest(f"structured has {sorted(map(str, unknown))}; it may have one of {_KINDS}")
    if len(given) != 1:
        has = ", ".join(sorted(given)) or "nothing"
        raise InvalidRequest(f"structured has {has}; it must have exactly one of {_KINDS}")
    [(name, content)] = given.items()
    return cast(StructuredOutput, {name: _CHECKS[name](content)})


def _schema_text(schema: Any) -> str:
    if callable(made := getattr(schema, "model_json_schema", None)):
        schema = made()
    if isinstance(schema, str):
        _check_size("the JSON schema", schema, MAX_SCHEMA_BYTES)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"structured json is no JSON text ({_reason(error)}); give a schema") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"structured json is a {type(schema).__name__}; a JSON schema is an object")
    check_shape(schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"structured json cannot be written as JSON: {_reason(error)}") from None
    _check_size("the JSON schema", text, MAX_SCHEMA_BYTES)
    return text


def check_shape(schema: Any) -> None:
    """Bound depth and number of values, one level at a time: a deep schema must not exhaust our own stack."""
    level, values = [schema], 0
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        values += len(level)
        if values > MAX_SCHEMA_VALUES:
            raise InvalidRequest(f"the JSON schema has more than {MAX_SCHEMA_VALUES} values; simplify it")
        for value in level:
            if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
                raise InvalidRequest(f"the JSON schema has the number {value}; beyond 2**53 they are not exact")
        level = [part for value in level for part in _parts(value)]
        if not level:
            return
    raise InvalidRequest(f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} deep; flatten it with $defs and $ref")


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _json_object(wanted: Any) -> bool:
    if wanted is not True:
        raise InvalidRequest(f"structured json_object is {wanted!r}; it must be True, or left out")
    return True


def _bounded_text(name: str, limit: int) -> Callable[[Any], str]:
    def check(text: Any) -> str:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"structured {name} is {text!r:.60}; it must be a non-empty string")
        _check_size(f"structured {name}", text, limit)
        return text

    return check


def _choices(texts: Any) -> list[str]:
    if not isinstance(texts, list | tuple) or not texts:
        raise InvalidRequest(f"structured choice is {texts!r:.60}; it must be a list of texts")
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"structured choice has {len(texts)} texts; at most {MAX_CHOICES} are allowed")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"structured choice contains {text!r:.60}; each must be a non-empty string")
    _check_size("structured choice", "".join(texts), MAX_CHOICE_BYTES)
    return list(texts)


def _check_size(what: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeError:
        raise InvalidRequest(f"{what} is not valid Unicode text; remove unpaired surrogates") from None
    if size > limit:
        raise InvalidRequest(f"{what} has {size} bytes; at most {limit} are allowed")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "json": _schema_text,
    "json_object": _json_object,
    "regex": _bounded_text("regex", MAX_REGEX_BYTES),
    "grammar": _bounded_text("grammar", MAX_GRAMMAR_BYTES),
    "choice": _choices,
}
_KINDS = ", ".join(_CHECKS)
