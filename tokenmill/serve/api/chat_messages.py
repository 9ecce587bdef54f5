"""Conversations as clients send them, brought into the form that chat templates know, with the tools on offer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.model.marked_text import MARK, Marks, is_marked
from tokenmill.serve.errors import HttpError
from tokenmill.serve.tool_calls.definitions import Choice

Messages = list[dict[str, Any]]

_ROLES = {"developer": "system", "function": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_RESERVED = (
    "self",
    "template",
    "chat_template",
    "add_generation_prompt",
    "messages",
    "tools",
    "bos_token",
    "eos_token",
    "max_characters",
)
MOST_MESSAGES = 20_000  # of a conversation, and parts of a message: more would only keep the server busy
MOST_VARIABLES = 64


def normal_messages(messages: Sequence[Mapping[str, Any]], marks: Marks | None = None) -> Messages:
    """marks: where parts that are marked as modules are put aside; None: they are read like others. Raises
    InvalidRequest."""
    if len(messages) > MOST_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries; at most {MOST_MESSAGES} are allowed")
    return [_normal(number, message, marks) for number, message in enumerate(messages)]


def _normal(number: int, message: Mapping[str, Any], marks: Marks | None) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"messages[{number}] has the role {role!r:.60}; it must be a string such as 'user'")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["role"] = _ROLES.get(role, role)
    content = message.get("content")
    modules = marks is not None
    text_of(f"messages[{number}]", content, modules)  # checked as it came
    kept["content"] = text_of(f"messages[{number}]", content if marks is None else marks.take_out(content), modules)
    calls = kept.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidRequest(f"tool_calls is a {type(calls).__name__}; it must be a list")
    if calls:
        kept["tool_calls"] = [_normal_call(f"messages[{number}]", call) for call in calls]
    return kept


def text_of(where: str, content: Any, modules: bool = False) -> str:
    """The text of a content: a string, parts of text, or nothing. `modules`: some parts may be marked as such."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} has a content of type {type(content).__name__}; it must be a string")
    if len(content) > MOST_MESSAGES:
        raise InvalidRequest(f"{where} has {len(content)} parts; at most {MOST_MESSAGES} are allowed")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else part
        if is_marked(part) and not modules:
            raise InvalidRequest(
                f"{where} has a part with {MARK}, which only messages of /v1/chat/completions may have"
            )
        if not isinstance(text, str) or (kind is not None and kind not in _TEXT_PARTS):
            raise InvalidRequest(f"{where} has a part of type {kind!r:.60}; this model reads text only")
        texts.append(text)
    return "".join(texts)


def _normal_call(where: str, call: Any) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get the object that the client's text describes."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest(f"{where} has the tool call {call!r:.60}; it must have a function with a name")
    return {**call, "type": "function", "function": {**function, "arguments": arguments_of(where, function)}}


def arguments_of(where: str, function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{where} has tool call arguments that are no JSON: {arguments!r:.60}") from None


def template_input(
    messages: Messages,
    tools: list[dict[str, Any]] | None,
    choice: Choice,
    template: str | None,
    variables: dict[str, Any] | None = None,
) -> tuple[Messages, dict[str, Any]]:
    """Messages and options for `Prompts.chat_ids`. A template that knows no tools is told of them in words."""
    if len(variables or ()) > MOST_VARIABLES:
        raise InvalidRequest(f"chat_template_kwargs has more than {MOST_VARIABLES} names")
    for name in _RESERVED:
        if variables and name in variables:
            raise HttpError(400, f"chat_template_kwargs may not set {name!r}", "invalid_value", "chat_template_kwargs")
    options = dict(variables or {})
    shown = [] if choice == "none" else [_as_function(tool) for tool in tools or []]
    if "tools" in (template or ""):
        return messages, options | ({"tools": shown} if shown else {})
    return _with_tools_as_text(messages, shown), options


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """The shape that templates know; the Responses API has it all in one object."""
    if isinstance(tool.get("function"), dict):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    return {"type": "function", "function": function}


def _with_tools_as_text(messages: Messages, tools: list[dict[str, Any]]) -> Messages:
    texts = [_as_text(message) for message in messages]
    if not tools:
        return texts
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions, one per line as JSON:\n{lines}\n"
        'To call one, write <tool_call>{"name": "its name", "arguments": {...}}</tool_call>.'
    )
    if texts and texts[0]["role"] == "system":
        return [{**texts[0], "content": f"{texts[0]['content']}\n\n{text}"}, *texts[1:]]
    return [{"role": "system", "content": text}, *texts]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and their results as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    said = [json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}) for call in calls]
    text = "\n".join([*filter(None, [message["content"]]), *(f"<tool_call>{one}</tool_call>" for one in said)])
    return {"role": message["role"], "content": text}
