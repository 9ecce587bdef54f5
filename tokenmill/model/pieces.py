"""The bytes that each token stands for: what decoding and streaming are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from tokenmill.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps an id to bytes, so that text is the UTF-8 of their concatenation, whatever kind the tokenizer is."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        steps = list(_decoder_steps(backend))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._words = not steps  # without a decoder, tokens are words with spaces between them
        self._space = "".join(_space_marks(steps))
        self.drops_first_space = self._words or any(_strips_start(step) for step in steps)

    def bytes_of(self, id: int) -> bytes:
        """The bytes of a token; none for an id outside the vocabulary."""
        known = self._known.get(id)
        if known is None:
            token = self._backend.id_to_token(id) if 0 <= id < 1 << 32 else None
            known = self._known[id] = b"" if token is None else self._to_bytes(token)
        return known

    def _to_bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, kept as plain text
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._words:
            return f" {token}".encode()
        return (token.replace(self._space, " ") if self._space else token).encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    if backend.decoder is None:
        return
    state = json.loads(backend.decoder.__getstate__())
    for step in state["decoders"] if state["type"] == "Sequence" else [state]:
        if step["type"] not in ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"):
            raise ModelError(f"the tokenizer decodes with {step['type']!r}, which is not supported; use another model")
        yield step


def _space_marks(steps: list[dict[str, Any]]) -> Iterator[str]:
    """The character that stands for a space, if the tokenizer has one."""
    for step in steps:
        if step["type"] == "Metaspace":
            yield step["replacement"]
        elif step["type"] == "Replace" and step["content"] == " ":
            yield step["pattern"].get("String", "")


def _strips_start(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("start", 0) > 0)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one visible character: itself where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()
BYTE_ALPHABET = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
