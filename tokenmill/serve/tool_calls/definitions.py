"""Tools that a request offers, checked, and the structured output that a `tool_choice` makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.sampling.structured import StructuredOutput, check_shape

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Choice = str  # "auto", "none", "required", or "=" and the name of a tool


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema


def checked_tools(payload: Any) -> list[Tool]:
    """The tools of a request. Raises InvalidRequest."""
    if payload is None:
        return []
    if not isinstance(payload, list | tuple):
        raise InvalidRequest(f"tools is a {type(payload).__name__}; it must be a list")
    if len(payload) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(payload)} entries; at most {MAX_TOOLS} are allowed")
    tools = [_checked_tool(number, tool) for number, tool in enumerate(payload)]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools has {double!r} more than once; give each tool its own name")
    return tools


def checked_choice(payload: Any, tools: list[Tool]) -> Choice:
    """OpenAI's `tool_choice` as a Choice. Raises InvalidRequest."""
    if payload is None:
        return "auto" if tools else "none"
    if isinstance(payload, str) and payload in ("auto", "none", "required"):
        if payload == "required" and not tools:
            raise InvalidRequest("tool_choice is 'required' but there are no tools; give some")
        return payload if tools else "none"
    if isinstance(payload, Mapping) and payload.get("type") == "function":
        function = payload.get("function", payload)  # the Responses API has the name beside the type
        name = function.get("name") if isinstance(function, Mapping) else None
        if any(tool.name == name for tool in tools):
            return f"={name}"
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools")
    raise InvalidRequest(f"tool_choice is {payload!r:.60}; it must be auto, none, required, or name functions")


def structured_from_choice(tools: list[Tool], choice: Choice, parallel: bool = True) -> StructuredOutput | None:
    """The form of the answer where the client insists on a call: a list of calls, or the arguments of the named one."""
    if choice.startswith("="):
        return StructuredOutput(json=named_tool(tools, choice).parameters)
    if choice != "required":
        return None
    for tool in tools:
        check_shape(tool.parameters)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/tool{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {
        f"tool{number}": _moved(tool.parameters, f"#/$defs/tool{number}") for number, tool in enumerate(tools)
    }
    return StructuredOutput(json=schema)


def _checked_tool(number: int, tool: Any) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise InvalidRequest(f"tools[{number}] is {tool!r:.60}; only tools of type 'function' are known")
    function = tool.get("function", tool)  # the Responses API has it all in one object
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"tools[{number}] has the name {name!r:.60}; use letters, digits, _ . : and -, up to 128")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"the parameters of tool {name!r} are {parameters!r:.60}; they must be a JSON schema")
    return Tool(name, parameters)


def named_tool(tools: list[Tool], choice: Choice) -> Tool:
    return next(tool for tool in tools if tool.name == choice[1:])


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself, from the root of another one in which it now stands at `place`."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else (value if key in ("const", "enum", "default", "examples") else _moved(value, place))
            for key, value in schema.items()
        }
    return [_moved(value, place) for value in schema] if isinstance(schema, list | tuple) else schema
