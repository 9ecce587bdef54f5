"""SuffixProposer: what followed when the newest tokens stood before, in the request's own text or a recent answer."""

from __future__ import annotations

import ctypes
import hashlib
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.engine.request import Request
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.ops.native.library import Library

CAPACITY = 1 << 19  # tokens of all texts together
SLOT_BITS = 21  # two places of 8 bytes each: with the tokens 34 MB in all, taken as they are first used
MOST_READ = 4096  # tokens of prompts that are taken in between two steps: about half a millisecond

_LENGTHS = (3, 4, 6, 10, 16, 32)  # of matches: below each a kind of its own
_PRIOR = (0.15, 0.25, 0.45, 0.6, 0.75, 0.85, 0.95)  # that the next token is the same, by these


class SuffixProposer:
    """Longest match over the request's own text and the recent answers of its partition (its cache salt)."""

    name = "suffix"
    on_device = 0
    kinds = (len(_LENGTHS) + 1) * 4

    def __init__(self, library: Library, capacity: int = CAPACITY, slot_bits: int = SLOT_BITS) -> None:
        self._c = _declared(library)
        self._pages, self._bits = -(-capacity // self._c.tm_suffix_page()), slot_bits
        self._index = self._new()
        self._texts: dict[str, _Text] = {}  # by request
        self._last_id = 0

    def prior(self, kind: int, depth: int) -> float:
        length, own, agreed = kind // 4, kind // 2 % 2, kind % 2
        likely = _PRIOR[min(length + depth // 2, len(_PRIOR) - 1)]
        return min(0.97, likely * (1.1 if own else 0.9) * (1.0 if agreed else 0.7))

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        texts = self._take_in(requests)
        ids = np.array([text.id if text.is_whole else 0 for text in texts], dtype=np.uint32)
        out = np.empty((len(ids), length), dtype=np.int32)
        counts = np.empty(len(ids), dtype=np.uint32)
        facts = np.empty((len(ids), 4), dtype=np.uint32)
        self._c.tm_suffix_propose(self._index, len(ids), _at(ids), length, _at(out), _at(counts), _at(facts))
        drafts: list[Draft | None] = [None] * len(ids)
        for i in np.flatnonzero(counts).tolist():
            matched, own, same, seen = facts[i].tolist()
            kind = bisect_right(_LENGTHS, matched) * 4 + own * 2 + (same == seen)
            drafts[i] = Draft(out[i, : counts[i]].tolist(), [kind] * int(counts[i]))
        return drafts

    def ended(self, request: Request) -> None:
        text = self._texts.pop(request.id, None)
        if text is not None:
            self._c.tm_suffix_close(self._index, text.id)

    def forget(self, salt: str | None = None) -> None:
        if salt is not None:
            self._c.tm_suffix_forget(self._index, partition_of(salt))
            return
        self._c.tm_suffix_delete(self._index)
        self._index = self._new()
        self._texts.clear()

    def _new(self) -> ctypes.c_void_p:
        made = self._c.tm_suffix_new(self._pages, self._bits)
        if not made:
            raise MemoryError("no memory for an index of suffixes")
        return ctypes.c_void_p(made)

    def __del__(self) -> None:
        if getattr(self, "_index", None):
            self._c.tm_suffix_delete(self._index)

    def _take_in(self, requests: Sequence[Request]) -> list[_Text]:
        """Append what texts gained, long prompts in several turns."""
        texts, gained = [], _Gained()
        left = MOST_READ
        for request in requests:
            text = self._texts.get(request.id)
            if text is None:
                text = self._open(request)
            texts.append(text)
            tokens = request.tokens
            if text.known < request.prompt_len:
                end = min(request.prompt_len, text.known + left)
                prompt = _Gained()
                prompt.add(text, tokens[text.known : end])
                left -= end - text.known
                self._append(prompt, answer=False)
                text.known = end
            text.is_whole = text.known >= request.prompt_len
            if text.is_whole and text.known < len(tokens):
                gained.add(text, tokens[text.known :])
                text.known = len(tokens)
        self._append(gained, answer=True)
        return texts

    def _open(self, request: Request) -> _Text:
        self._last_id = self._last_id % 0xFFFFFFFE + 1
        text = self._texts[request.id] = _Text(self._last_id)
        self._c.tm_suffix_open(self._index, text.id, partition_of(request.salt))
        return text

    def _append(self, gained: _Gained, answer: bool) -> None:
        ids, counts = np.array(gained.ids, dtype=np.uint32), np.array(gained.counts, dtype=np.uint32)
        tokens = np.array(gained.tokens, dtype=np.int32)
        self._c.tm_suffix_append(self._index, len(ids), _at(ids), _at(counts), _at(tokens), int(answer))


class _Text:
    """A request's text in the index."""

    __slots__ = ("id", "is_whole", "known")

    def __init__(self, id: int) -> None:
        self.id = id
        self.known = 0  # leading tokens that are in the index
        self.is_whole = False  # whether those are all that the host knows


class _Gained:
    """Tokens that texts gained, for one call."""

    __slots__ = ("counts", "ids", "tokens")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []

    def add(self, text: _Text, tokens: list[int]) -> None:
        self.ids.append(text.id)
        self.counts.append(len(tokens))
        self.tokens += tokens


def partition_of(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


def _at(array: npt.NDArray[np.int32] | npt.NDArray[np.uint32]) -> int:
    return array.ctypes.data


def _declared(library: Library) -> ctypes.CDLL:
    c, pointer, word = library.c, ctypes.c_void_p, ctypes.c_uint32
    c.tm_suffix_new.argtypes, c.tm_suffix_new.restype = [word, word], pointer
    c.tm_suffix_delete.argtypes, c.tm_suffix_delete.restype = [pointer], None
    c.tm_suffix_page.argtypes, c.tm_suffix_page.restype = [], word
    c.tm_suffix_pages_in_use.argtypes, c.tm_suffix_pages_in_use.restype = [pointer], word
    c.tm_suffix_open.argtypes, c.tm_suffix_open.restype = [pointer, word, ctypes.c_uint64], None
    c.tm_suffix_close.argtypes, c.tm_suffix_close.restype = [pointer, word], None
    c.tm_suffix_forget.argtypes, c.tm_suffix_forget.restype = [pointer, ctypes.c_uint64], None
    c.tm_suffix_append.argtypes, c.tm_suffix_append.restype = [pointer, word, *[pointer] * 3, ctypes.c_int32], None
    c.tm_suffix_propose.argtypes, c.tm_suffix_propose.restype = [pointer, word, pointer, word, *[pointer] * 3], None
    return c
