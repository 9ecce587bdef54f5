"""Restrictions on calls that a model may make or leave: `allowed_tools`, and one call at most."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.sampling.structured import StructuredOutput
from tokenmill.serve.tool_calls.definitions import Tool

_MODES = ("auto", "required")


def allowed_tools(payload: Any, tools: list[Tool]) -> tuple[Any, list[Tool]]:
    """A `tool_choice` without its `allowed_tools`, and the tools that may be called. Raises InvalidRequest."""
    if not isinstance(payload, Mapping) or payload.get("type") != "allowed_tools":
        return payload, tools
    inner = payload.get("allowed_tools", payload)  # the Responses API has mode and tools beside the type
    mode, listed = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    if mode not in _MODES:
        raise InvalidRequest(f"tool_choice has the mode {mode!r:.60}; that of allowed_tools is auto or required")
    if not isinstance(listed, list) or not listed:
        raise InvalidRequest("tool_choice allows no tools; list some of them, or choose 'none'")
    names = {_name(one) for one in listed}
    if unknown := names - {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice allows {min(unknown)!r:.130}, which is not among the tools")
    return mode, [tool for tool in tools if tool.name in names]


def _name(listed: Any) -> str:
    function = listed.get("function", listed) if isinstance(listed, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or listed.get("type", "function") != "function":
        raise InvalidRequest(f"tool_choice allows {listed!r:.60}; only tools of type 'function' are known, by name")
    return name


def restriction(allowed: list[Tool] | None, parallel: bool, format: str) -> StructuredOutput | None:
    """The form of an answer in which text is free and calls are not: they go to `allowed` tools (None: to any), and
    without `parallel` there is one at most. Of bare JSON ("json", see `format_of`) only the beginning is known to be a
    call: there the first one is held to `allowed`, and their number is free."""
    rules = []
    head = rf'{_SPACE}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"'
    names = "|".join(re.escape(tool.name) for tool in allowed or [])
    if format == "json":
        if allowed is not None:
            rules.append(rf'~(/{_SPACE}({_MARKS})?{_SPACE}\[?{head}/ ~(/({names})"/ {_ANY}))')
    else:
        if allowed is not None:  # whatever opens as a call goes on as one
            rules.append(rf'~({_ANY} /<tool_call>/ ~(/{head}({names})"/ {_ANY}))')
        if not parallel:
            rules.append(f"~({_ANY} /<tool_call>/ {_ANY} /<tool_call>/ {_ANY})")
    if not rules:
        return None
    return StructuredOutput(grammar=f"start: ANSWER\nANSWER: {' & '.join(rules)}")


_SPACE = r"\s{0,20}"
_ANY = (
    "~(/a/ & /b/)"  # also what is no UTF-8, which a dot does not match: an answer may end in the midst of a character
)
_MARKS = r"<\|python_tag\|>|\[TOOL_CALLS\]"
