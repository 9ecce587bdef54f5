"""What a session is to do, as clients write it: steps of JSON become the operations of a program."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tokenmill.compat import did_you_mean
from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.program.expressions import Gen, Select, gen, select
from tokenmill.program.operations import Choose, CloseTurn, Generate, OpenTurn, Operation, Variable
from tokenmill.serve.api.sampling_params import check_list, check_logprobs

MOST_STEPS = 10_000
_GEN = {"name", "regex", "json", "choices", "grammar"} | {one.name for one in fields(SamplingParams)}
_SELECT = {"name", "choices", "normalized"}
_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words")


@dataclass(frozen=True)
class Fork:
    """States of these names begin where this one is."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Nobody goes on from these states."""

    names: tuple[str, ...]


Step = Operation | Fork | Drop


def steps_of(given: list[Any], in_turn: bool = False) -> list[Step]:
    """Raises InvalidRequest, and then nothing has happened."""
    found: list[Step] = []
    for one in given:
        if isinstance(one, str):
            found.append(one)
        elif not isinstance(one, dict):
            raise InvalidRequest(
                f"do has {one!r:.60}; a step is text or an object with gen, select, role, fork or drop"
            )
        elif one.keys() == {"gen"}:
            found.append(Generate(_gen(one["gen"]), Variable()))
        elif one.keys() == {"select"}:
            found.append(Choose(_select(one["select"]), Variable()))
        elif one.keys() == {"role", "content"} and not in_turn:
            found += _turn(one["role"], one["content"])
        elif one.keys() == {"fork"} and not in_turn:
            found.append(Fork(_names("fork", one["fork"])))
        elif one.keys() == {"drop"} and not in_turn:
            found.append(Drop(_names("drop", one["drop"])))
        else:
            where = "inside a turn" if in_turn else "here"
            raise InvalidRequest(
                f"do has a step with {', '.join(sorted(one))[:60]!r} {where}; a step is text or an object with gen, "
                'select, fork or drop, or one with role and content, as {"gen": {"max_tokens": 20}}'
            )
        if len(found) > MOST_STEPS:
            raise InvalidRequest(f"do has more than {MOST_STEPS} steps; send several calls")
    return found


def _turn(role: Any, content: Any) -> list[Step]:
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"role is {role!r:.60}; it must be text, such as 'user'")
    if not isinstance(content, str | list):
        raise InvalidRequest(f"content is {content!r:.60}; it must be text or a list of steps")
    return [OpenTurn(role), *steps_of([content] if isinstance(content, str) else content, in_turn=True), CloseTurn()]


def _gen(given: Any) -> Gen:
    options = _options("gen", given, _GEN)
    check_logprobs("logprobs", options.get("logprobs"))
    for name in _LISTS:
        check_list(name, options.get(name))
    [part] = gen(**options)
    assert isinstance(part, Gen)
    return part


def _select(given: Any) -> Select:
    options = _options("select", given, _SELECT)
    if not isinstance(options.get("choices"), list):
        raise InvalidRequest(f"choices is {options.get('choices')!r:.60}; it must be a list of texts")
    if not isinstance(options.get("normalized", True), bool):
        raise InvalidRequest(f"normalized is {options['normalized']!r:.60}; it must be true or false")
    [part] = select(**options)
    assert isinstance(part, Select)
    return part


def _options(what: str, given: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{what} is {given!r:.60}; it must be an object")
    for name in given.keys() - known:
        raise InvalidRequest(f"{what} has {name[:60]!r}; {did_you_mean(name, known)}")
    return given


def _names(what: str, given: Any) -> tuple[str, ...]:
    names = given if isinstance(given, list) else []
    if not names or not all(isinstance(one, str) and 0 < len(one) <= 100 for one in names):
        raise InvalidRequest(f"{what} is {given!r:.60}; it must be a list of names of up to 100 characters")
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{what} has a name twice; each state needs one of its own")
    return tuple(names)
