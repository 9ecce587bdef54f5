"""TextBound: tells a text that is too long before it is tokenized, from how many characters a token can stand for.

It never refuses what would fit. Where a tokenizer drops certain characters these do not count; where it may make a
single token of any text (unknown words, say) there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from tokenmill.model.pieces import BYTE_ALPHABET

# Canonical composition makes one character of four at most, as in U+1F82; the other forms only lengthen.
_COMPOSED = 4
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts", "FixedLength")
_DROPS_SPACES = ("Whitespace", "WhitespaceSplit")
_UTF8 = [*range(0xC0), *range(0xC2, 0xF5)]  # the other bytes are in no text
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACES += "\u2028\u2029\u202f\u205f\u3000"  # whatever str.isspace says yes to


@dataclass(frozen=True)
class TextBound:
    """At most `per_token` characters become one token, not counting those that may be `dropped`."""

    per_token: int
    dropped: str = ""

    def may_fit(self, text: str, tokens: int) -> bool:
        """False: `text` is certain to be more than `tokens` tokens."""
        most, length = self.per_token * tokens, len(text)
        if length > most:
            for character in self.dropped:  # a loop, so that other threads get their turn in between
                length -= text.count(character)
        return length <= most


def bound_of(backend: tokenizers.Tokenizer) -> TextBound | None:
    """None: there is no bound. Looks through the vocabulary, which takes a while."""
    vocabulary = backend.get_vocab()
    shrinks, dropped = 1, ""
    normalizers, splitters = list(_steps(backend.normalizer)), list(_steps(backend.pre_tokenizer))
    for step in normalizers:
        by = _shrinks(step)
        if by is None:
            return None
        shrinks *= by
    for step in splitters:
        if step["type"] in _DROPS_SPACES:
            dropped = _SPACES
        elif step["type"] not in _KEEPS_ALL or step.get("behavior") == "Removed":
            return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        dropped = _SPACES  # they swallow those beside them
    by_bytes = any(step["type"] == "ByteLevel" for step in normalizers + splitters)
    lost = _lost(backend.model, vocabulary, by_bytes)
    if lost is None:
        return None
    return TextBound(shrinks * max(map(len, vocabulary), default=1), "".join({*dropped, *lost}))


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for inner in state.get("normalizers") or state.get("pretokenizers") or []:
        yield from _flat(inner)


def _shrinks(step: dict[str, Any]) -> int | None:
    """How many times shorter a text may become; None: any number of times."""
    if step["type"] != "Replace":
        return _NORMALIZERS.get(step["type"])
    pattern, content = step["pattern"].get("String"), step["content"]
    return -(-len(pattern) // len(content)) if pattern and content else None


def _lost(model: Any, vocabulary: dict[str, int], by_bytes: bool) -> str | None:
    """Characters that become no part of any token; None where that cannot be told."""
    if not isinstance(model, models.BPE | models.Unigram):
        return None  # of a word that is not known one token is left
    if by_bytes and isinstance(model, models.BPE) and model.unk_token is None:
        missing = [byte for byte in _UTF8 if BYTE_ALPHABET[byte] not in vocabulary]
        # Of every longer character one byte is from 80 to BF.
        return None if any(0x80 <= byte < 0xC0 for byte in missing) else "".join(chr(b) for b in missing if b < 0x80)
    if _falls_back(model) and all(f"<0x{byte:02X}>" in vocabulary for byte in _UTF8):
        return ""
    return "" if isinstance(model, models.BPE) and model.unk_token is not None and not model.fuse_unk else None


def _falls_back(model: Any) -> bool:
    """Whether what is unknown becomes bytes."""
    if isinstance(model, models.BPE):
        return bool(model.byte_fallback)
    return bool(json.loads(model.__getstate__()).get("byte_fallback"))
