"""A large body is decoded in pieces to what it is in one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.serve.http import large_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80) | st.text(
    '\\"\n\u00e9水\U0001f600a', max_size=80
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)
PIECES = st.integers(8, 64)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=6), st.booleans(), st.sampled_from([None, 1]), PIECES)
def test_pieces_make_the_whole(content: dict[str, Any], ascii_only: bool, indent: int | None, piece: int) -> None:
    body = json.dumps(content, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "CHUNK", piece)
        assert large_json.decode(b" " + body + b"\n") == msgspec.json.decode(body) == content


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), st.data(), PIECES)
def test_what_is_no_json_is_none_in_pieces(content: dict[str, Any], data: st.DataObject, piece: int) -> None:
    body = bytearray(json.dumps(content, ensure_ascii=data.draw(st.booleans())).encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))

    def said(decode: Any) -> Any:
        try:
            return decode(bytes(body))
        except (ValueError, RecursionError):
            return "refused"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "CHUNK", piece)
        assert said(large_json.decode) == said(msgspec.json.decode), bytes(body)


def test_no_piece_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in every script, escaped or not, and token ids."""
    longest = 0
    decode = msgspec.json.decode

    def noted(part: bytes) -> Any:
        nonlocal longest
        longest = max(longest, len(part))
        return decode(part)

    monkeypatch.setattr(large_json.msgspec.json, "decode", noted)
    monkeypatch.setattr(large_json, "CHUNK", 1000)
    text = "The mill.\n" * 1000 + "水車は川" * 1000 + "\U0001f600" * 1000 + '\\"' * 3000
    content = {"messages": [{"role": "user", "content": text}], "ids": [*range(10_000)]}
    for ascii_only in (True, False):
        assert large_json.decode(json.dumps(content, ensure_ascii=ascii_only).encode()) == content
    assert 500 < longest < 1100


def test_what_is_nested_deep_is_not_looked_through_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of megabytes inside of a thousand objects would take minutes."""

    class Counting:
        looked = 0

        def decode(self, part: bytes) -> Any:
            self.looked += 1
            return msgspec.json.decode(part, type=dict[str, msgspec.Raw])

    counting = Counting()
    monkeypatch.setattr(large_json, "_object", counting)
    monkeypatch.setattr(large_json, "CHUNK", 1000)
    body = b'{"a":' * 300 + b'"%b"' % (b"x" * 5000) + b"}" * 300
    assert large_json.decode(body) == msgspec.json.decode(body)
    assert counting.looked == large_json.DEEPEST


@pytest.mark.parametrize("around", [b"\x0b", b"\x0c", b"\xa0"])
def test_only_what_json_calls_whitespace_may_stand_around_it(around: bytes) -> None:
    for body in (around + b'{"a": 1}', b'{"a": 1}' + around):
        with pytest.raises(ValueError):
            large_json.decode(body)
    assert large_json.decode(b' \t\r\n{"a": 1}\n') == {"a": 1}
