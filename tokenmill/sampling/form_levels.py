"""How deep the form of an answer goes, references followed. The parser of forms goes down by recursion: some thousand
levels exhaust its stack, and that ends the process, the front's or the engine's, without an error to catch."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from tokenmill.errors import InvalidRequest
from tokenmill.sampling.structured import StructuredOutput

MOST_LEVELS = 1000  # of a schema; a stack of 8 MB holds 2400 and more
MOST_MARKS = 1500  # colons and opening brackets of a Lark grammar, of which none can go deeper; there it is 2000


def check_levels(structured: StructuredOutput) -> None:
    """Raise InvalidRequest where a form goes too deep."""
    if "json" in structured and (levels := schema_levels(json.loads(structured["json"]))) > MOST_LEVELS:
        raise InvalidRequest(
            f"the JSON schema goes {levels} levels deep when its references are followed; at most {MOST_LEVELS} are "
            "allowed"
        )
    if "grammar" in structured and (marks := sum(map(structured["grammar"].count, ":([{"))) > MOST_MARKS:
        raise InvalidRequest(
            f"structured grammar has {marks} colons and opening brackets; at most {MOST_MARKS} are allowed"
        )


class _SchemaPart:
    """A schema that something refers to, up to the next such schemas inside it."""

    def __init__(self) -> None:
        self.depth = 0  # levels of its own
        self.next: set[int] = set()  # parts that it leads to, by the id() of their schemas


def schema_levels(schema: Any) -> int:
    """No way through the schema that passes every part once is longer. Parts that lead to each other count together."""
    references = _references(schema)
    targets = {reference: _target(schema, reference) for reference in references}
    if None in targets.values():  # by a name or an address: then every object and array might be on the way
        return sum(1 for _ in _containers(schema))
    parts = _parts(schema, {reference: id(found) for reference, found in targets.items()})
    longest: dict[int, int] = {}  # by part; groups come with those that they lead to before them
    for group in _groups(parts):
        after = max((longest[to] for one in group for to in parts[one].next if to not in group), default=0)
        longest.update(dict.fromkeys(group, after + sum(parts[one].depth for one in group)))
    return longest[id(schema)]


def _containers(schema: Any) -> Any:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            yield one
            waiting += one.values() if isinstance(one, dict) else one


def _references(schema: Any) -> set[str]:
    found = (one.get("$ref") for one in _containers(schema) if isinstance(one, dict))
    return {reference for reference in found if isinstance(reference, str)}


def _target(schema: Any, reference: str) -> Any:
    """What a reference inside the schema leads to; None where it is another kind, or leads nowhere."""
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        return None
    for name in unquote(reference[2:]).split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict | list) else None


def _parts(schema: Any, targets: dict[str, int]) -> dict[int, _SchemaPart]:
    """The parts of a schema, by id()."""
    heads = {id(schema), *targets.values()}
    parts = {head: _SchemaPart() for head in heads}
    waiting = [(schema, id(schema), 0)]  # a container, the part that it belongs to, the levels above it in there
    while waiting:
        one, owner, above = waiting.pop()
        if id(one) in heads and id(one) != owner:
            parts[owner].next.add(id(one))
            owner, above = id(one), 0
        part = parts[owner]
        part.depth = max(part.depth, above + 1)
        if isinstance(one, dict) and isinstance(reference := one.get("$ref"), str):
            part.next.add(targets[reference])
        inner = one.values() if isinstance(one, dict) else one
        waiting += [(each, owner, above + 1) for each in inner if isinstance(each, dict | list)]
    return parts


def _groups(parts: dict[int, _SchemaPart]) -> list[set[int]]:
    """Parts that lead to each other, in groups, each after those that it leads to (Tarjan's way, without recursion)."""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    grouped: set[int] = set()
    groups: list[set[int]] = []
    path: list[int] = []
    for start in parts:
        work = [(start, iter(parts[start].next))] if start not in number else []
        while work:
            one, rest = work[-1]
            if one not in number:
                number[one] = lowest[one] = len(number)
                path.append(one)
            for to in rest:
                if to not in number:
                    work.append((to, iter(parts[to].next)))
                    break
                if to not in grouped:
                    lowest[one] = min(lowest[one], number[to])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[one])
                if lowest[one] == number[one]:
                    group = {one}
                    while (last := path.pop()) != one:
                        group.add(last)
                    groups.append(group)
                    grouped |= group
    return groups
