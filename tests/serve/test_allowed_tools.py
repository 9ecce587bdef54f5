"""Restrictions on calls: what a model may write under them, byte by byte, and what is made of it."""

from __future__ import annotations

import pytest

from tokenmill.serve.tool_calls.allowed_tools import restriction
from tokenmill.serve.tool_calls.definitions import checked_tools
from tokenmill.serve.tool_calls.parsers import BareParser, TaggedParser, parse, parser_for

TOOLS = checked_tools([{"type": "function", "function": {"name": name}} for name in ("time", "v1.time", "weather")])
SOME = TOOLS[:2]
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


def fits(text: str, grammar: str) -> bool | None:
    """Whether the text may be written under the grammar; None: it may, but more must follow."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    if not all(matcher.consume_token(byte) for byte in text.encode()):
        return False
    return True if matcher.is_accepting() else None


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ('Just text, a < b, <tool, {"name": "weather"}.', True),
        ("", True),
        (CALL % "time", True),
        (f"Hm.\n{CALL % 'v1.time'}\n{CALL % 'time'}\nDone.", True),
        (CALL % "weather", False),
        (CALL % "v1xtime", False),
        (CALL % "tim", False),
        (f"{CALL % 'time'}{CALL % 'weather'}", False),
        ("<tool_call>oh", False),
        ('<tool_call>{"name": "ti', None),
        ("möglich 🙂", True),
    ],
)
def test_tagged_calls_go_to_allowed_tools(text: str, may: bool | None) -> None:
    form = restriction(SOME, True, "hermes")
    assert form is not None and fits(text, form["grammar"]) is may


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("Just text.", True),
        ('{"city": "Rome"}', True),
        ('{"name": "time", "parameters": {"name": "weather"}}', True),
        ('[TOOL_CALLS] [{"name": "weather"', False),
        ('<|python_tag|>{"name": "weather"', False),
        ('{ "name" : "tim"', False),
    ],
)
def test_bare_calls_begin_with_an_allowed_tool(text: str, may: bool) -> None:
    form = restriction(SOME, True, "json")
    assert form is not None and fits(text, form["grammar"]) is may


def test_one_call_at_most() -> None:
    form = restriction(None, False, "hermes")
    assert form is not None
    assert fits(f"So. {CALL % 'weather'} Done.", form["grammar"]) is True
    assert fits(f"{CALL % 'time'}{CALL % 'time'}", form["grammar"]) is False
    both = restriction(SOME, False, "hermes")
    assert both is not None
    assert fits(CALL % "time", both["grammar"]) is True and fits(CALL % "weather", both["grammar"]) is False
    assert restriction(None, True, "hermes") is None and restriction(None, False, "json") is None


@pytest.mark.parametrize("format", ["hermes", "json"])
def test_a_call_of_another_tool_is_text(format: str) -> None:
    text = CALL % "weather" if format == "hermes" else '{"name": "weather", "parameters": {}}'
    parser = parser_for(SOME, "auto", format, only=True)
    assert isinstance(parser, TaggedParser if format == "hermes" else BareParser)
    assert parse(parser, text) == (text, [])
    parser = parser_for(SOME, "auto", format, only=True)
    assert parser is not None and [one.name for one in parse(parser, text.replace("weather", "time"))[1]] == ["time"]
