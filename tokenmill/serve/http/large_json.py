"""Decodes a large JSON object in chunks: the decoder lets no other thread run while it is at work on one."""

from __future__ import annotations

from typing import Any

import msgspec

CHUNK = 1 << 18  # bytes: less than a millisecond
DEEPEST = 8  # levels that are taken apart: each is looked through once more, and texts of messages are at the sixth
_BACKSLASH = ord("\\")
_LONGEST_ESCAPE = 6  # bytes: \uXXXX
_HIGH_SURROGATES = (b"d8", b"d9", b"da", b"db")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


def decode(body: bytes) -> Any:
    """What msgspec.json.decode returns for `body`. Raises what that raises."""
    body = body.strip(b" \t\n\r")  # what JSON calls whitespace
    if len(body) <= CHUNK or not body.startswith(b"{"):
        return msgspec.json.decode(body)
    return _value(body)


def _value(part: bytes, level: int = 1) -> Any:
    """Of a part whose syntax is known to be right: whoever found its end has looked through it."""
    if len(part) <= CHUNK:
        return msgspec.json.decode(part)
    match part[:1]:
        case b"{" | b"[" if level > DEEPEST:
            return msgspec.json.decode(part)
        case b"{":
            return {name: _value(bytes(one), level + 1) for name, one in _object.decode(part).items()}
        case b'"':
            return _string(part)
        case b"[" if any(sign in part for sign in (b'"', b"{")) or b"[" in part[1:]:
            return [_value(bytes(one), level + 1) for one in _array.decode(part)]
        case b"[":
            return _numbers(part)
    return msgspec.json.decode(part)


def _numbers(part: bytes) -> list[Any]:
    """An array of nothing but numbers and the like."""
    values: list[Any] = []
    at, last = 1, len(part) - 1
    while at <= last:
        comma = part.find(b",", at + CHUNK // 4)
        end = last if comma < 0 else comma
        values += msgspec.json.decode(b"[%b]" % part[at:end])
        at = end + 1
    return values


def _string(part: bytes) -> str:
    chunks = []
    at, last = 1, len(part) - 1
    while at < last:
        end = last if last - at <= CHUNK else _cut(part, at, last)
        chunks.append(msgspec.json.decode(b'"%b"' % part[at:end]))
        at = end
    return "".join(chunks)


def _cut(part: bytes, begin: int, last: int) -> int:
    """Where a chunk of a string that begins at `begin` may end: not inside of a character or an escape, nor between two
    escapes that are one character. Where there is no such place, at its end."""
    for place in range(begin + CHUNK, begin, -1):
        if part[place] & 0xC0 == 0x80:  # inside of a character
            continue
        if part.rfind(b"\\", max(begin, place - _LONGEST_ESCAPE), place) < 0 or _begins_escape(part, begin, place):
            return place
    return last


def _begins_escape(part: bytes, begin: int, place: int) -> bool:
    """Whether an escape begins there that is a character of its own."""
    if part[place] != _BACKSLASH:
        return False
    before = place
    while before > begin and part[before - 1] == _BACKSLASH:
        before -= 1
    return (place - before) % 2 == 0 and part[place - 4 : place - 2].lower() not in _HIGH_SURROGATES
