"""Forms of answers that would exhaust the stack of whoever reads them are refused; everything else is as before."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_server import Server
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.sampling.form_levels import MOST_LEVELS, MOST_MARKS, schema_levels
from tokenmill.sampling.grammar import check_grammar
from tokenmill.sampling.structured import checked_structured


def chain(length: int, link: Any = lambda to: {"items": to}) -> dict[str, Any]:
    """Definitions each of which refers to the next."""
    defs = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": defs | {f"a{length}": {"type": "null"}}}


def grammar(length: int) -> str:
    return "start: a0\n" + "\n".join(f'a{n}: ("b" a{n + 1})*' for n in range(length)) + f'\na{length}: "x"'


@pytest.mark.parametrize(
    ("schema", "levels"),
    [
        ({}, 1),
        ({"x": {"y": [{"z": {}}]}}, 5),
        ({"$ref": "#"}, 1),
        (chain(10), 2 + 10 * 2 + 1),
        ({"$defs": {"n": {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}}}, 5),
        ({"a": {"$ref": "#/b"}, "b": {"c": {"$ref": "#/a"}}}, 4),  # round and round, but everything once
        ({"a~/b": {"c": {}}, "d": {"e": {"$ref": "#/a~0~1b"}}}, 5),
        ({"anyOf": [{"a": {}}], "x": {"$ref": "#/anyOf/0"}}, 4),
        ({"a": {"b": {}}, "c": {"d": {}}, "$ref": "#name"}, 5),  # anything may be called that
    ],
)
def test_levels_are_counted_along_references(schema: dict[str, Any], levels: int) -> None:
    assert schema_levels(schema) == levels


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_no_way_through_a_schema_is_longer(edges: list[tuple[int, int]]) -> None:
    defs: dict[str, list[Any]] = {f"d{n}": [] for n in range(9)}
    for one, to in edges:
        defs[f"d{one}"].append({"$ref": f"#/$defs/d{to}"})

    def longest(one: int, seen: frozenset[int]) -> int:
        ways = [longest(to, seen | {one}) for first, to in set(edges) if first == one and to not in seen | {one}]
        return 1 + bool(defs[f"d{one}"]) + max(ways, default=0)

    assert schema_levels({"$ref": "#/$defs/d0", "$defs": defs}) >= longest(0, frozenset())


DEEP: dict[str, dict[str, Any]] = {
    "references": {"json": chain(2600, lambda to: to)},
    "properties": {"json": chain(1000, lambda to: {"properties": {"p": to}, "required": ["p"]})},
    "items": {"json": chain(2000)},
    "rules": {"grammar": "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(4000)) + '\na4000: "x"'},
    "brackets": {"grammar": grammar(2500)},
}


@pytest.mark.parametrize("form", DEEP.values(), ids=DEEP)
def test_a_chain_that_would_end_the_server_is_refused(server: Server, form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        check_grammar(checked_structured(form))  # type: ignore[arg-type]
    asked = {"prompt": "x", "max_tokens": 4, "structured_outputs": form}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 400 and "at most" in answer.json()["error"]["message"]


def test_a_chain_that_is_just_allowed_is_read_by_front_and_engine(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": chain(MOST_LEVELS // 2 - 10)}}]
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required"}
    for path, form in (
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": chain(MOST_LEVELS - 5, lambda to: to)}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": chain(MOST_LEVELS // 2 - 5)}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": grammar(MOST_MARKS // 2 - 5)}}),
        ("/v1/chat/completions", chat),
    ):
        answer = httpx.post(f"{server.url}{path}", json={"max_tokens": 4, **form}, timeout=60)
        assert answer.status_code in (200, 400), answer.text  # the parser has other limits as well
    assert httpx.get(f"{server.url}/health/ready").json()["restarts"] == 0
