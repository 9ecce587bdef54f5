"""Parts of a prompt that are marked as modules: found in what users send, and followed through a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.model.tokenizer import Tokenizer

MARK = "cache_module"  # in a part: whether it is a module
_CLOSE = 0.8  # of a spelling; APIs have other names that begin with cache_
MOST_MODULES = 1024  # of a prompt

Spans = list[tuple[int, int]]  # first and end, in tokens
Piece = tuple[str | list[int], bool]  # text, or its tokens; and whether it is a module


def is_marked(part: Any) -> bool:
    """Whether a part of a content is marked. Raises InvalidRequest for a mark that is neither true nor false."""
    if not isinstance(part, Mapping):
        return False
    check_spelling(part)
    mark = part.get(MARK)
    if mark not in (None, True, False):
        raise InvalidRequest(f"{MARK} is {mark!r:.60}; it must be true or false")
    return bool(mark)


def check_spelling(part: Mapping[Any, Any]) -> None:
    """Raises InvalidRequest for a mark that is nearly one: whoever wrote it meant something by it."""
    for name in part:
        if isinstance(name, str) and name != MARK and get_close_matches(name[:60].lower(), [MARK], cutoff=_CLOSE):
            raise InvalidRequest(f"a part has {name[:60]!r}; did you mean {MARK!r}?")


@dataclass
class Marks:
    """Modules stand aside while a template is rendered, and words that nobody can foresee stand in for them."""

    texts: list[str] = field(default_factory=list)
    _word: str = field(default_factory=lambda: f"module-{secrets.token_hex(12)}-")

    def stand_in(self, text: str) -> str:
        """What is written in place of a module."""
        if len(self.texts) == MOST_MODULES:
            raise InvalidRequest(f"the prompt has over {MOST_MODULES} parts marked with {MARK}; mark fewer")
        self.texts.append(text)
        return f"{self._word}{len(self.texts) - 1}."

    def of_message(self, message: Any) -> Any:
        """The same of a whole message."""
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list | tuple):
            return message
        return {**message, "content": self.take_out(message["content"])}

    def take_out(self, content: Any) -> Any:
        """A message's content, without the texts of its modules."""
        if not isinstance(content, list | tuple):
            return content
        return [
            {**part, "text": self.stand_in(part["text"])} if is_marked(part) and type(part.get("text")) is str else part
            for part in content
        ]

    def pieces(self, rendered: str) -> list[Piece]:
        """What was rendered, cut into texts and modules."""
        parts = re.split(re.escape(self._word) + r"(\d+)\.", rendered)
        return [(self.texts[int(part)], True) if number % 2 else (part, False) for number, part in enumerate(parts)]


def encode_pieces(
    tokenizer: Tokenizer | None,  # None: there are no texts
    pieces: list[Piece],
    max_tokens: int,
    add_special_tokens: bool,
) -> tuple[list[int], Spans]:
    """Each piece by itself: a module has the same tokens wherever it stands."""
    ids: list[int] = []
    spans: Spans = []
    for number, (body, is_module) in enumerate(pieces):
        found = body if isinstance(body, list) else []
        if isinstance(body, str) and tokenizer is not None:
            special = add_special_tokens and number == 0
            if special and is_module:  # what texts begin with is no part of a module
                ids += tokenizer.encode("", max_tokens=max_tokens)
            special = special and not is_module
            found = tokenizer.encode(body, add_special_tokens=special, max_tokens=max_tokens) if body else []
        if is_module and found:
            spans.append((len(ids), len(ids) + len(found)))
        ids += found
        if len(ids) >= max_tokens:  # too long, which is all that anybody needs to know
            break
    return ids, spans
