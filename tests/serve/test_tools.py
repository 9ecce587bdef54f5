"""Tool calls are found in what a model says, in the same way however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.serve.tool_calls.definitions import checked_choice, checked_tools, structured_from_choice
from tokenmill.serve.tool_calls.parsers import (
    ArgumentsParser,
    BareParser,
    TaggedParser,
    ToolCall,
    ToolCallParser,
    collected,
    format_of,
    parse,
    parser_for,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = checked_tools([WEATHER, TIME])


def numbered() -> Any:
    count = itertools.count()
    return lambda: f"id{next(count)}"


def tagged() -> TaggedParser:
    return TaggedParser(numbered())


def bare() -> BareParser:
    return BareParser({"weather", "time"}, numbered())


def call(index: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(f"id{index}", name, arguments)


DEEP = f'<tool_call>{{"name": {"[" * 3000}{"]" * 3000}}}</tool_call>'
TAGGED = [
    ("no call at all  \n", "no call at all  \n", []),
    ('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', "", [("time", "{}")]),
    ('Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n', "Let me see.",
     [("weather", '{"city": "Rome"}')]),
    ('<tool_call>{"name": "a", "arguments": {"x": [1, {"y": "}</tool_call>"}]}}</tool_call>\n'
     '<tool_call>\n{"arguments": {"q": "\\"{\\\\"}, "name": "b"}\n</tool_call>', "",
     [("a", '{"x": [1, {"y": "}</tool_call>"}]}'), ("b", '{"q": "\\"{\\\\"}')]),
    ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call> and more', " and more", [("a", '{"x": 1}')]),
    ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    ('<tool_call>{"id": 7, "name": "a", "parameters": [1, 2], "arguments": {"no": 1}}', "", [("a", "[1, 2]")]),
    ('<tool_call>{"name": "a", "arguments": {"x": 1</tool_call> hm', " hm", [("a", '{"x": 1')]),  # braces forgotten
    ('<tool_call>{"name": "a", "arguments": {"x": "cut', "", [("a", '{"x": "cut')]),
    ('<tool_call>{"name": "a", "arguments": {}}</tool_', "", [("a", "{}")]),
    ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ('<tool_call>{"verb": "a"}</tool_call>', '<tool_call>{"verb": "a"}</tool_call>', []),
    ('<tool_call>{"name": "a', '<tool_call>{"name": "a', []),
    (DEEP, DEEP, []),
    ("a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    ('é<tool_call>{"name":"\\u00e9","arguments":{"é":"\\u00e9"}}</tool_call>', "é", [("é", '{"é":"\\u00e9"}')]),
]  # fmt: skip

BARE = [
    ("Just text { with braces }.", "Just text { with braces }.", []),
    ('{"name": "time", "parameters": {}}', "", [("time", "{}")]),
    ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [("weather", '{"city": "Rome"}')]),
    ('{"type": "function", "name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome"}}', "",
     [("time", "{}"), ("weather", '{"city": "Rome"}')]),
    ('[{"name": "time", "arguments": {}},\n {"name": "time", "arguments": {"a": "]"}}]\n', "",
     [("time", "{}"), ("time", '{"a": "]"}')]),
    ('[TOOL_CALLS] [{"name": "time", "arguments": {}}]', "", [("time", "{}")]),
    ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),  # an answer in JSON, not a call
    (' [{"city": "Rome"}] \n', ' [{"city": "Rome"}] \n', []),
    ("[T", "[T", []),
    ("  ", "  ", []),
    ('{"name": "time", "parameters": {}} done', "done", [("time", "{}")]),
    ('{"parameters": {"city": "Pa', '{"parameters": {"city": "Pa', []),
    ('{"name": "time", "parameters": {}}; {"name": "nobody"}', '{"name": "nobody"}', [("time", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), TAGGED)
def test_tagged_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = content, [call(index, *one) for index, one in enumerate(calls)]
    assert parse(tagged(), text) == expected
    parser = tagged()
    assert collected([*map(parser.feed, text), parser.finish()]) == expected


@pytest.mark.parametrize(("text", "content", "calls"), BARE)
def test_bare_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = content, [call(index, *one) for index, one in enumerate(calls)]
    assert parse(bare(), text) == expected
    parser = bare()
    assert collected([*map(parser.feed, text), parser.finish()]) == expected


fragments = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "time", "arguments": {', "}}", '"', "\\", ";", ",", "[", "]", " ", "\n",
     '{"name": "weather"', ', "parameters": ', '{"a": [1, "x"]}', "<", "text", "<|python_tag|>", "[TOOL_CALLS]", ":"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(fragments, max_size=14), cuts=st.lists(st.integers(0, 200), max_size=12), which=st.booleans())
def test_cuts_change_nothing(parts: list[str], cuts: list[int], which: bool) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parser: ToolCallParser = tagged() if which else bare()
    deltas = [parser.feed(text[a:b]) for a, b in itertools.pairwise(edges)]
    assert collected([*deltas, parser.finish()]) == parse(tagged() if which else bare(), text)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=5), values, max_size=3), min_size=1, max_size=3),
    indent=st.sampled_from([None, 2]),
    ascii=st.booleans(),
    form=st.sampled_from(["tagged", "list", "lines"]),
)
def test_any_arguments_come_through(
    arguments: list[dict[str, Any]], indent: int | None, ascii: bool, form: str
) -> None:
    said = [json.dumps({"name": "time", "arguments": a}, indent=indent, ensure_ascii=ascii) for a in arguments]
    text = {
        "tagged": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in said),
        "list": f"[{', '.join(said)}]",
        "lines": "; ".join(said),
    }[form]
    parser: ToolCallParser = tagged() if form == "tagged" else bare()
    deltas = [*map(parser.feed, text), parser.finish()]
    content, calls = collected(deltas)
    assert content == ""
    assert [json.loads(one.arguments) for one in calls] == arguments
    assert [one.id for one in calls] == [f"id{n}" for n in range(len(calls))]
    first = [part for delta in deltas for part in delta.calls if part.name is not None]
    assert [part.index for part in first] == list(range(len(calls)))  # a name comes once, before any argument


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = tagged()
    parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "R')
    [delta] = parser.feed("ome").calls
    assert (delta.index, delta.id, delta.name, delta.arguments) == (0, None, None, "ome")


def test_text_is_shown_at_once_unless_it_may_be_a_tag() -> None:
    parser = tagged()
    assert parser.feed("Hello <").content == "Hello"
    assert parser.feed("3").content == " <3"


def test_a_named_tool_takes_the_whole_answer() -> None:
    parser = parser_for(TOOLS, "=weather", ids=numbered())
    assert isinstance(parser, ArgumentsParser)
    assert parse(parser, '{"city": "Rome"}') == ("", [call(0, "weather", '{"city": "Rome"}')])
    parser = parser_for(TOOLS, "=weather", ids=numbered())
    assert parser is not None
    assert collected([parser.finish()]) == ("", [call(0, "weather", "")])


def test_who_parses_what() -> None:
    assert parser_for(TOOLS, "none") is None
    assert parser_for([], "auto") is None
    assert isinstance(parser_for(TOOLS, "required"), BareParser)
    assert isinstance(parser_for(TOOLS, "auto", format_of("... <tool_call> ...")), TaggedParser)
    assert isinstance(parser_for(TOOLS, "auto", format_of("... <|python_tag|> ...")), BareParser)
    assert format_of(None) == "hermes"


def test_choices() -> None:
    assert checked_choice(None, TOOLS) == "auto" and checked_choice(None, []) == "none"
    assert checked_choice("required", TOOLS) == "required"
    assert checked_choice({"type": "function", "function": {"name": "time"}}, TOOLS) == "=time"
    assert checked_choice({"type": "function", "name": "time"}, TOOLS) == "=time"
    for wrong in ("any", 3, {"type": "function", "function": {"name": "nobody"}}, {"type": "x"}):
        with pytest.raises(InvalidRequest):
            checked_choice(wrong, TOOLS)
    with pytest.raises(InvalidRequest, match="no tools"):
        checked_choice("required", [])


@pytest.mark.parametrize("wrong", [
    "tools", [3], [{"type": "search"}], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}],
    [{"type": "function", "function": {"name": "a", "parameters": []}}], [TIME, TIME], [TIME] * 200,
], ids=str)  # fmt: skip
def test_wrong_tools_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest):
        checked_tools(wrong)


def test_a_required_call_is_a_list_of_calls_to_the_tools() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    form = structured_from_choice(TOOLS, "required")
    assert form is not None
    valid = jsonschema.Draft202012Validator(form["json"]).is_valid
    assert valid([{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}}])
    for wrong in (
        [],
        [{"name": "weather", "arguments": {"city": "Bonn"}}],  # the tool's own $defs are followed
        [{"name": "time", "arguments": {"x": 1}}],
        [{"name": "nobody", "arguments": {}}],
        [{"name": "time"}],
    ):
        assert not valid(wrong)
    one = structured_from_choice(TOOLS, "required", parallel=False)
    assert one is not None and one["json"]["maxItems"] == 1
    assert structured_from_choice(TOOLS, "auto") is None
    named = structured_from_choice(TOOLS, "=weather")
    assert named is not None and SamplingParams(structured=named).structured is not None


def test_required_calls_can_be_compiled() -> None:
    pytest.importorskip("llguidance")
    from tokenmill.sampling.grammar import check_grammar

    for choice in ("required", "=weather", "=time"):
        made = SamplingParams(structured=structured_from_choice(TOOLS, choice)).structured
        assert made is not None
        check_grammar(made)


def test_a_tool_with_an_absurd_schema_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    tools = checked_tools([{"type": "function", "function": {"name": "a", "parameters": deep}}])
    with pytest.raises(InvalidRequest, match="nested"):
        structured_from_choice(tools, "required")
