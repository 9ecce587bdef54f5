"""An answer as a row of blocks, texts and calls, which open, grow and close: what two of the APIs stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tokenmill.serve.tool_calls.parsers import CallDelta, ToolCallParser, ToolDelta, new_id


@dataclass
class ContentBlock:
    """A text, or a call with the JSON text of its arguments."""

    index: int
    text: str = ""
    name: str | None = None  # of the tool; None: this is a text
    id: str = field(default_factory=new_id)  # of the call
    logprobs: list[msgspec.Raw] = field(default_factory=list)


@dataclass(frozen=True)
class BlockChange:
    """`what` is open, grow or close; `text` is what was added, and `block` what there is now."""

    what: str
    block: ContentBlock
    text: str = ""
    logprobs: list[msgspec.Raw] = field(default_factory=list)


class ContentBlocks:
    """Follows one answer. A block closes when another opens; at the end there is at least one."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser
        self.all: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._call: int | None = None  # number of the call that is open

    @property
    def called(self) -> bool:
        return any(block.name is not None for block in self.all)

    def feed(self, text: str, last: bool, logprobs: list[msgspec.Raw] | None = None) -> Iterator[BlockChange]:
        found = ToolDelta(text) if self._parser is None else self._parser.feed(text)
        yield from self._take(found, logprobs or [])
        if last:
            if self._parser is not None:
                yield from self._take(self._parser.finish(), [])
            if not self.all:
                yield from self._begin(ContentBlock(0))
            yield from self._close()

    def _take(self, found: ToolDelta, logprobs: list[msgspec.Raw]) -> Iterator[BlockChange]:
        # Tokens may have no text yet, parts of a character; what is told of them does not wait for it.
        if found.content or (logprobs and self._parser is None):
            if self._open is None or self._open.name is not None:
                yield from self._begin(ContentBlock(len(self.all)))
            yield self._grow(found.content, logprobs)
        for part in found.calls:
            yield from self._take_call(part)

    def _take_call(self, part: CallDelta) -> Iterator[BlockChange]:
        if self._call != part.index:
            yield from self._begin(ContentBlock(len(self.all), name=part.name or "", id=part.id or new_id()))
            self._call = part.index
        if part.arguments:
            yield self._grow(part.arguments, [])

    def _begin(self, block: ContentBlock) -> Iterator[BlockChange]:
        yield from self._close()
        self.all.append(block)
        self._open = block
        self._call = None
        yield BlockChange("open", block)

    def _grow(self, text: str, logprobs: list[msgspec.Raw]) -> BlockChange:
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs
        return BlockChange("grow", self._open, text, logprobs)

    def _close(self) -> Iterator[BlockChange]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockChange("close", block)
