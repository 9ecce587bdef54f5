"""Parsers that find tool calls in a model's text while it streams.

tools = checked_tools(payload)                                 # OpenAI's `tools`
params.structured = structured_from_choice(tools, choice)      # None where the model may also just talk
parser = parser_for(tools, choice, format_of(chat_template))   # None where calls are not looked for
for text in stream: delta = parser.feed(text)                  # text to show, and parts of calls
delta = parser.finish()
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.serve.tool_calls.definitions import Choice, Tool, named_tool
from tokenmill.serve.tool_calls.scanner import CallFragment, CallScanner


@dataclass(frozen=True)
class CallDelta:
    """A part of a call. The first of each call carries its id and name; arguments are JSON text, in parts."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class ToolDelta:
    """What became certain with some text."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str


class ToolCallParser(Protocol):
    """Finds calls in streamed text. What it gives does not depend on how the text is cut up."""

    def feed(self, text: str) -> ToolDelta: ...

    def finish(self) -> ToolDelta:
        """What was held back, once no text will follow."""
        ...


def format_of(chat_template: str | None) -> str:
    """How a model with this template writes calls: "hermes" is in <tool_call> tags (also Qwen), "json" bare objects."""
    template = chat_template or ""
    if "<tool_call>" not in template and ("python_tag" in template or "[TOOL_CALLS]" in template):
        return "json"
    return "hermes"


def parser_for(
    tools: list[Tool],
    choice: Choice,
    format: str = "hermes",
    ids: Callable[[], str] | None = None,
    only: bool = False,
) -> ToolCallParser | None:
    """Whoever makes calls of an answer; None where none are wanted. With `only`, a call of anything else is text."""
    ids = ids or new_id
    if not tools or choice == "none":
        return None
    if choice.startswith("="):
        return ArgumentsParser(named_tool(tools, choice).name, ids)
    if choice == "required" or format == "json":
        return BareParser({tool.name for tool in tools}, ids)
    return TaggedParser(ids, {tool.name for tool in tools} if only else None)


def parse(parser: ToolCallParser, text: str) -> tuple[str, list[ToolCall]]:
    """A whole answer at once: what there is to show, and the calls."""
    return collected([parser.feed(text), parser.finish()])


def collected(deltas: Iterable[ToolDelta]) -> tuple[str, list[ToolCall]]:
    content = ""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        content += delta.content
        for part in delta.calls:
            known = calls.get(part.index) or ToolCall(part.id or "", part.name or "", "")
            calls[part.index] = ToolCall(known.id, known.name, known.arguments + part.arguments)
    return content, [calls[index] for index in sorted(calls)]


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ArgumentsParser:
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str, ids: Callable[[], str]) -> None:
        self._first: CallDelta | None = CallDelta(0, ids(), name)

    def feed(self, text: str) -> ToolDelta:
        first, self._first = self._first, None
        if first is None:
            return ToolDelta(calls=[CallDelta(0, arguments=text)] if text else [])
        return ToolDelta(calls=[CallDelta(0, first.id, first.name, text)])

    def finish(self) -> ToolDelta:
        return self.feed("") if self._first is not None else ToolDelta()


class _CallParser(ABC):
    """What the two other parsers share: calls are numbered, and white space around them is nobody's text."""

    def __init__(self, ids: Callable[[], str], names: set[str] | None) -> None:
        self._ids = ids
        self._names = names  # that count as calls; None: all
        self._rest = ""  # not looked at yet, or perhaps the beginning of something
        self._count = 0
        self._scanner: CallScanner | None = None
        self._space = ""  # white space that is shown if text follows
        self._content: list[str] = []
        self._parts: list[CallDelta] = []

    def feed(self, text: str) -> ToolDelta:
        self._rest += text
        while self._rest and (self._go_on() if self._scanner is None else self._scan(self._scanner)):
            pass
        return self._taken()

    @abstractmethod
    def _go_on(self) -> bool:
        """One move where no call is being scanned; False when more text is needed."""

    @abstractmethod
    def _scanned(self, scanner: CallScanner) -> None:
        """A call has ended, or it was none after all."""

    def _scan(self, scanner: CallScanner) -> bool:
        used = scanner.feed(self._rest)
        self._add(scanner.take())
        self._rest = self._rest[used:]
        if scanner.ended:
            self._scanner = None
            self._count += scanner.named
            self._scanned(scanner)
        return scanner.ended

    def _show(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._content.append(self._space + kept)
            self._space = ""
        self._space += text[len(kept) :]

    def _add(self, fragment: CallFragment) -> None:
        index = self._count
        if fragment.name is not None:
            self._space = ""
            self._parts.append(CallDelta(index, self._ids(), fragment.name, fragment.arguments))
        elif fragment.arguments:
            self._parts.append(CallDelta(index, arguments=fragment.arguments))

    def _taken(self) -> ToolDelta:
        delta = ToolDelta("".join(self._content), self._parts)
        self._content, self._parts = [], []
        return delta


class TaggedParser(_CallParser):
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` between text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, ids: Callable[[], str] = new_id, names: set[str] | None = None) -> None:
        super().__init__(ids, names)
        self._after = False  # a call has ended and its closing tag may follow

    def finish(self) -> ToolDelta:
        rest, self._rest = self._rest, ""
        if self._scanner is not None:
            if not self._scanner.named:
                self._show(self.OPEN + self._scanner.raw)
        elif not (self._after and self.CLOSE.startswith(rest.strip())):  # a closing tag that was cut off says nothing
            self._show(rest)
        if not self._count and self._scanner is None:
            self._content.append(self._space)
        return self._taken()

    def _go_on(self) -> bool:
        if self._after:
            stripped = self._rest.lstrip()
            if self.CLOSE.startswith(stripped) and stripped != self.CLOSE:
                return False
            self._rest = stripped.removeprefix(self.CLOSE)
            self._after = False
            return True
        at = self._rest.find(self.OPEN)
        if at < 0:
            held = _overlap(self._rest, self.OPEN)
            self._show(self._rest[: len(self._rest) - held])
            self._rest = self._rest[len(self._rest) - held :]
            return False
        self._show(self._rest[:at])
        self._rest = self._rest[at + len(self.OPEN) :]
        self._scanner = CallScanner(self._names)
        return True

    def _scanned(self, scanner: CallScanner) -> None:
        self._after = scanner.named
        if not scanner.named:
            self._show(self.OPEN + scanner.raw)


class BareParser(_CallParser):
    """The answer is a call, a list of calls, or calls with semicolons between them; anything else is text.

    Models that write so also have words that are no calls but begin like one, so only known names count.
    """

    _BEFORE = re.compile(r"\s*(<\|python_tag\|>|\[TOOL_CALLS\])?\s*\[?\s*")
    _BETWEEN = re.compile(r"[\s,;\]]*")
    _MARKS = ("<|python_tag|>", "[TOOL_CALLS]")

    def __init__(self, names: set[str], ids: Callable[[], str] = new_id) -> None:
        super().__init__(ids, names)
        self._talks = False  # what follows is text

    def finish(self) -> ToolDelta:
        if self._scanner is not None and not self._scanner.named:
            self._content.append(("" if self._count else self._opening) + self._scanner.raw)
        elif self._scanner is None:
            self._content.append(self._rest if not self._count else "")
            self._content.append(self._space if self._talks else "")
        self._rest = ""
        return self._taken()

    _opening = ""  # what stood before the call that is being scanned

    def _go_on(self) -> bool:
        if self._talks:
            self._show(self._rest)
            self._rest = ""
            return False
        pattern = self._BETWEEN if self._count else self._BEFORE
        found = pattern.match(self._rest)
        assert found is not None  # both match nothing, too
        may_be_mark = not self._count and any(mark.startswith(self._rest.lstrip()) for mark in self._MARKS)
        if found.end() == len(self._rest) or may_be_mark:
            return False
        if self._rest[found.end()] != "{":
            self._talks = True
            if self._count:
                self._rest = self._rest[found.end() :]
            return True
        self._opening, self._rest = self._rest[: found.end()], self._rest[found.end() :]
        self._scanner = CallScanner(self._names)
        return True

    def _scanned(self, scanner: CallScanner) -> None:
        if not scanner.named:
            self._talks = True
            self._rest = ("" if self._count else self._opening) + scanner.raw + self._rest


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of the tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)
