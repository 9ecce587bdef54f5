"""CallScanner: follows the JSON text of one tool call character by character; arguments come out as they come in."""

from __future__ import annotations

import json
from dataclasses import dataclass

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\n\r"


@dataclass
class CallFragment:
    name: str | None = None  # in the first fragment of a call
    arguments: str = ""


class CallScanner:
    """Reads `{"name": ..., "arguments": {...}}`, with its members in any order and others among them.

    Arguments are held back until the name is known. With `names`, a call to anything else is none.
    """

    def __init__(self, names: set[str] | None = None) -> None:
        self._names = names
        self.raw = ""  # everything read, until the name is known
        self.named = False
        self.ended = False  # the object is complete, or it turned out to be no call
        self._name: str | None = None
        self._arguments = ""
        self._fragment = CallFragment()
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key_candidate = ""
        self._key: str | None = None  # of the member whose value is being read
        self._text = ""  # the string, or the value of a member, that is being read
        self._as_text = False  # the arguments are a string that holds JSON
        self._has_arguments = False  # they are complete

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belong to the call."""
        for at, character in enumerate(text):
            if self.ended or not self._read(character):
                self.ended = True
                return at
            if not self.named:
                self.raw += character
        return len(text)

    def take(self) -> CallFragment:
        """What became known since the last time."""
        fragment, self._fragment = self._fragment, CallFragment()
        return fragment

    def _read(self, character: str) -> bool:
        """Whether the character belongs to the call; one that no JSON has outside of strings, a tag's, ends it."""
        if self._in_string:
            self._read_in_string(character)
        elif self._depth == 0:
            self._depth = character == "{"
            return character == "{" or character in _SPACE
        elif character in "<>;":
            return False
        elif self._depth == 1 and self._key is None:
            return self._read_key(character)
        else:
            self._read_between(character)
        return True

    def _read_in_string(self, character: str) -> None:
        self._value_character(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key_candidate = self._text

    def _read_between(self, character: str) -> None:
        if self._depth == 1 and character in ",}":
            self._end_value()
            if character == "}":
                self._end()
            return
        if self._depth == 1 and character in _SPACE:  # around a value
            return
        self._value_character(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _read_key(self, character: str) -> bool:
        if character == '"':
            self._in_string = True
            self._text = '"'
        elif character == ":":
            self._key = _decoded(self._key_candidate)
            self._text = ""
        elif character == "}":
            self._end()
        else:
            return character in _SPACE or character == ","
        return True

    def _value_character(self, character: str) -> None:
        if self._key not in _ARGUMENTS or self._has_arguments:
            self._text += character
            return
        if not self._text:
            self._as_text = character == '"'
            self._text = character  # the first one is enough to know that the value has begun
            if self._as_text:
                return
        if self._as_text:
            self._text += character
        else:
            self._say(character)

    def _end_value(self) -> None:
        if self._key in _ARGUMENTS:
            if self._as_text and not self._has_arguments:
                self._say(_decoded(self._text) or "")
            self._has_arguments = True
        elif self._key == "name":
            name = _decoded(self._text)
            if not name or (self._names is not None and name not in self._names):
                self.ended = True
            else:
                self._name = name
                self.named = True
                self._fragment.name = name
                self._fragment.arguments += self._arguments
                self.raw = self._arguments = ""
        self._key = None
        self._key_candidate = self._text = ""
        self._as_text = False

    def _say(self, arguments: str) -> None:
        if self.named:
            self._fragment.arguments += arguments
        else:
            self._arguments += arguments

    def _end(self) -> None:
        if not self._has_arguments:
            self._say("{}")
        self.ended = True


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
