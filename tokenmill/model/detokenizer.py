"""Text of a growing output: whole characters only, and cut where a stop string appears."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from tokenmill.model.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the ids of one request into text deltas.

    The deltas and the final flush, joined, are what `Tokenizer.decode` of prompt and output adds to that of the
    prompt. A character that is not complete yet is held back; if the prompt ends inside one, the output begins with it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Only the first character of the whole text may be a space that stands for nothing.
        self._drop_space = tokenizer.pieces.drops_first_space and not any(map(self._bytes, prompt_ids))
        self._utf8.decode(self._tail(prompt_ids))

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these tokens; possibly empty."""
        return self._start(self._utf8.decode(b"".join(map(self._bytes, ids))))

    def flush(self) -> str:
        """What was held back, once no token will follow: replacement characters for unfinished bytes."""
        return self._start(self._utf8.decode(b"", final=True))

    def _bytes(self, id: int) -> bytes:
        if self._skip and self._tokenizer.is_special(id):
            return b""
        return self._tokenizer.pieces.bytes_of(id)

    def _tail(self, ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt: four tell whether it ends inside a character, and where that began."""
        tail = b""
        for id in reversed(ids):
            tail = self._bytes(id) + tail
            if len(tail) >= 4:
                break
        return tail

    def _start(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Finds the first stop string in streamed text, and holds back text that may be the beginning of one.

    The match is the one that is complete first, and the longest of those that end at the same character, so the
    outcome does not depend on how the text was cut into deltas.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include  # whether the stop string itself is part of the output
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop the text ends with
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that may be shown now. After a match there is none."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        for index, character in enumerate(text):
            complete = self._advance(character)
            if complete is not None:
                self.match = complete
                shown = self._held + text[: index + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(complete)]
        shown = self._held + text
        keep = len(shown) - max(self._matched)
        self._held = shown[keep:]
        return shown[:keep]

    def flush(self) -> str:
        """The text held back, once none will follow."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Takes in one character; returns the longest stop string that ends with it."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            count, fallbacks = self._matched[index], self._fallbacks[index]
            while count and stop[count] != character:
                count = fallbacks[count - 1]
            if stop[count] == character:
                count += 1
            self._matched[index] = count
            if count == len(stop) and (complete is None or count > len(complete)):
                complete = stop
        return complete


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix too (Knuth-Morris-Pratt)."""
    table = [0] * len(stop)
    count = 0
    for index in range(1, len(stop)):
        while count and stop[count] != stop[index]:
            count = table[count - 1]
        if stop[count] == stop[index]:
            count += 1
        table[index] = count
    return table
