"""SamplingParams from what a client asked for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from tokenmill.errors import InvalidRequest
from tokenmill.params import MAX_LENGTH, SamplingParams
from tokenmill.sampling.structured import StructuredOutput
from tokenmill.serve.api.schemas import HOTTEST, JsonSchema, ResponseFormat, Sampling, TextFormat
from tokenmill.serve.errors import HttpError

_SAME_NAME = {field.name for field in fields(SamplingParams)} & set(Sampling.__struct_fields__) - {"top_k"}
_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words")
MOST_ENTRIES = 1024
MOST_LOGPROBS = 20
MOST_CHARACTERS = 16_384
LEAST_SHARE = 1e-9  # of probability, above 0, which the engine does not know


def sampling_params(
    body: Sampling,
    max_tokens: int | None,
    structured: StructuredOutput | None = None,
    restriction: StructuredOutput | None = None,
    **more: Any,
) -> SamplingParams:
    """`structured` is what tool_choice wants of the answer, if anything, and `restriction` what it wants of one that
    may have any form (see `RequestTools`). Raises InvalidRequest and HttpError."""
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.bad_words or body.min_tokens:  # no form goes together with these
        restriction = None
    wanted = single_structured(
        structured_from_format(body.response_format),
        cast(StructuredOutput | None, body.structured_outputs),
        None if body.regex is None else {"regex": body.regex},
        None if body.grammar is None else {"grammar": body.grammar},
        None if body.choice is None else {"choice": body.choice},
        structured,
    )
    return make_params(max_tokens, body.top_k, structured=wanted or restriction, **given, **more)


def make_params(max_tokens: int | None, top_k: int | None, *, hottest: float = HOTTEST, **given: Any) -> SamplingParams:
    """Numbers without an upper bound are cut to one that means the same; lists are refused beyond one, since every step
    of the engine, and so everybody, pays for them."""
    temperature = given.get("temperature")
    if temperature is not None and not 0 <= temperature <= hottest:
        raise InvalidRequest(f"temperature is {temperature:g}; it must be from 0 to {hottest}")
    if given.get("top_p") == 0:  # the likeliest token and none beside it
        given["top_p"] = LEAST_SHARE
    for name in _LISTS:
        check_list(name, given.get(name))
    return SamplingParams(
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_LENGTH),
        top_k=0 if top_k is None else min(top_k, MAX_LENGTH),
        **{name: value for name, value in given.items() if value is not None},
    )


def check_list(name: str, value: str | list[Any] | dict[str, Any] | None) -> None:
    several = [value] if isinstance(value, str) else value or []
    size = sum(len(one) for one in several if isinstance(one, str))
    if len(several) > MOST_ENTRIES or size > MOST_CHARACTERS:
        raise InvalidRequest(
            f"{name} has {len(several)} entries of {size} characters; at most {MOST_ENTRIES} and {MOST_CHARACTERS} are "
            "allowed"
        )


def check_logprobs(name: str, top: int | None) -> None:
    """Raises HttpError for more log-probabilities per token than may be asked for."""
    if top is not None and not 0 <= top <= MOST_LOGPROBS:
        raise InvalidRequest(f"{name} is {top}; it must be from 0 to {MOST_LOGPROBS}")


def structured_from_format(wanted: ResponseFormat | TextFormat | None) -> StructuredOutput | None:
    """OpenAI's `response_format`, or the Responses API's `text.format`."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "json_schema":
        inner: JsonSchema | TextFormat | None = wanted.json_schema if isinstance(wanted, ResponseFormat) else wanted
        if inner is None or inner.schema is None:
            raise HttpError(400, "a response format of type json_schema needs a schema", "invalid_value", "schema")
        return {"json": inner.schema}
    raise HttpError(
        400,
        f"the response format has type {wanted.type[:60]!r}; it may be text, json_object or json_schema",
        "invalid_value",
        "response_format",
    )


def single_structured(*forms: StructuredOutput | None) -> StructuredOutput | None:
    given = [structured for structured in forms if structured]
    if len(given) > 1:
        names = ", ".join(sorted(name for structured in given for name in structured))
        raise InvalidRequest(
            f"the form of the answer is asked for in {len(given)} ways ({names}); use one of response_format, regex, "
            "grammar, choice, structured_outputs and a required tool"
        )
    return given[0] if given else None
