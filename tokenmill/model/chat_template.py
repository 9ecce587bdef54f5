"""Renders a conversation into a prompt with the model's own jinja2 template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tokenmill.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from tokenmill.model.tokenizer import Tokenizer

MAX_PROMPT_CHARACTERS = 64 * 1024 * 1024
# That templates are written for, under one name or another; a template may name others.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model")


def render_for(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    """The prompt for `messages` in the format that a tokenizer comes with."""
    return render(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    max_characters: int = MAX_PROMPT_CHARACTERS,
    **extra: Any,
) -> str:
    """The prompt for `messages`; further keyword arguments are variables of the template."""
    if not template:
        raise InvalidRequest("the model has no chat template; pass chat_template, or generate from a plain prompt")
    variables = {
        **extra,
        "messages": check_messages(messages, template),
        "tools": tools,
        "documents": extra.get("documents"),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    compiled = _compile(template)
    parts: list[str] = []
    left = max_characters
    try:
        for part in compiled.generate(variables):
            left -= len(part)
            if left < 0:
                raise InvalidRequest(f"the chat template wrote over {max_characters} characters; shorten the messages")
            parts.append(part)
    except InvalidRequest:
        raise
    except _Refused as refusal:
        raise InvalidRequest(f"the chat template refuses these messages: {refusal}") from None
    except Exception as error:  # templates are foreign code: anything can go wrong in them
        raise InvalidRequest(
            f"the chat template failed on these messages ({type(error).__name__}: {error}); "
            "check their roles and contents, or pass another chat_template"
        ) from None
    return "".join(parts)


def check_messages(messages: Any, template: str) -> list[dict[str, Any]]:
    """Messages as templates expect them: a role, and content as one string (or None beside tool calls)."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest('messages must be a non-empty list such as [{"role": "user", "content": "Hello"}]')
    return [_check_message(index, message, template) for index, message in enumerate(messages)]


def _check_message(index: int, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"message {index} is a {type(message).__name__}; it must have a role and a content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"message {index} has role {role!r}; it must be a string such as 'user'")
    if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
        raise InvalidRequest(f"message {index} has role {role!r:.60}; it must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _text_of(index, content)}


def _text_of(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"message {index} has content of type {type(content).__name__}; it must be a string")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"message {index} has a part of type {kind!r}; only 'text' parts are supported")
        texts.append(text)
    return "".join(texts)


class _Refused(Exception):
    """Raised by a template through raise_exception."""


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the chat template cannot be compiled ({error}); pass another chat_template") from None


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Foreign templates may compute text and nothing else: no attributes of Python objects, no changes, no floods."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 64):
            raise OverflowError("a power is too large")
        if operator == "*" and any(hasattr(value, "__len__") for value in (left, right)):
            times, sized = (left, right) if isinstance(left, int) else (right, left)
            if times * len(sized) > MAX_PROMPT_CHARACTERS:
                raise OverflowError("a repeated text is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks answers for training, and keeps its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)
