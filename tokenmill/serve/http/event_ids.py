"""Event ids: how far a routed stream has come with an event, as text that any router and replica can go on from.

    REQUEST.HOME.CREATED.SEED.COUNTS.PLACE.NUMBERED.SUM      numbers but those of COUNTS and PLACE are hexadecimal

COUNTS are the tokens told of each sequence, `e` behind those that have ended: `12-7e`. A step's tokens may be told in
several events; an id between them says what the sequences had before and after the step (`12>14-7e`), and PLACE how
many of the step's events there were: `s2`, `u1`, `f1` in what comes at the start, for a step, and at the end (`u0`: all
of them). NUMBERED is the number of events where an API counts them, SUM a checksum of all these tokens.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from tokenmill.errors import InvalidRequest

MOST_SEQUENCES = 16  # of a stream whose events have ids: these grow with it
LONGEST = 1000  # characters
LAST_EVENT_ID = "last-event-id"
_REQUEST = re.compile("[0-9a-f]{32}")  # as routers name them
_START, _STEP, _END = "s", "u", "f"


@dataclass(frozen=True)
class Mark:
    """How far one sequence has come."""

    tokens: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Position:
    """What an event id says."""

    request: str
    home: int  # the replica that told the event, as its router named it
    created: int
    seed: int
    before: tuple[Mark, ...]
    after: tuple[Mark, ...]
    place: str  # in which part of the stream
    skip: int  # events of that part that were told; 0: all of a step's
    numbered: int
    digest: int

    @property
    def at_start(self) -> bool:
        return self.place == _START

    @property
    def at_end(self) -> bool:
        return self.place == _END


def position_of(text: str) -> Position:
    """Raises InvalidRequest."""
    try:
        if len(text) > LONGEST:
            raise ValueError(len(text))
        request, home, created, seed, counts, place, numbered, digest = text.split(".")
        steps = [one.split(">") for one in counts.split("-")]
        before, after = tuple(_mark(one[0]) for one in steps), tuple(_mark(one[-1]) for one in steps)
        found = Position(
            *(request, _hex(home), _hex(created), _hex(seed), before, after),
            *(place[:1], _decimal(place[1:]), _hex(numbered), _hex(digest)),
        )
        grow = all(one.tokens <= other.tokens for one, other in zip(before, after))
        if _REQUEST.fullmatch(request) is None or found.place not in (_START, _STEP, _END) or not grow:
            raise ValueError(request)
        if found.seed >= 2**63 or len(before) > MOST_SEQUENCES:
            raise ValueError(seed)
    except ValueError:
        raise InvalidRequest(
            f"Last-Event-ID is {text[:100]!r}, which is no id of an event of a stream that came through a router; send "
            "the last one as it was, or leave it out"
        ) from None
    return found


def is_event_id(text: str) -> bool:
    """Whether it is one of these; other servers have others."""
    try:
        position_of(text)
    except InvalidRequest:
        return False
    return True


def digest_of(sequences: Sequence[Sequence[int]]) -> int:
    """Of all tokens of all sequences."""
    return _joined([crc32(array("I", one).tobytes()) for one in sequences])


class EventIds:
    """Puts ids into the events of one stream, while it is told."""

    def __init__(self, request: str, home: int, created: int, seed: int, sequences: int) -> None:
        self._head = f"{request}.{home:x}.{created:x}.{seed:x}."
        self._sums = [0] * sequences
        self._counts = ["0"] * sequences

    def stamp_start(self, part: bytes, first: int = 0, numbered: int = 0) -> bytes:
        """Events before the first token; `first` of them were told, and are not in `part`."""
        return self._stamp(part, "-".join(self._counts), _START, first, numbered, whole=False)

    def stamp_step(
        self, part: bytes, news: Mapping[int, tuple[Sequence[int], Mark]], first: int = 0, numbered: int = 0
    ) -> bytes:
        """Events of a step: of each sequence that moved, its tokens and how far it has come with them."""
        before = self._counts.copy()
        for number, (tokens, mark) in news.items():
            self._sums[number] = crc32(array("I", tokens).tobytes(), self._sums[number])
            self._counts[number] = f"{mark.tokens}e" if mark.ended else f"{mark.tokens}"
        if not part:
            return part
        steps = "-".join([old if old == new else f"{old}>{new}" for old, new in zip(before, self._counts)])
        return self._stamp(part, steps, _STEP, first, numbered, whole=True)

    def stamp_end(self, part: bytes, first: int = 0, numbered: int = 0) -> bytes:
        """Events behind the last step."""
        return self._stamp(part, "-".join(self._counts), _END, first, numbered, whole=False)

    def _stamp(self, part: bytes, counts: str, place: str, first: int, numbered: int, whole: bool) -> bytes:
        """With `whole`, the last event of the part completes it, and what was before it does not matter any more."""
        events, digest, said = events_of(part), _joined(self._sums), []
        for left, one in zip(range(len(events) - 1, -1, -1), events):
            if whole and not left:
                at = f"{'-'.join(self._counts)}.{_STEP}0"
            else:
                at = f"{counts}.{place}{first + len(events) - left}"
            said.append(f"id: {self._head}{at}.{max(0, numbered - left):x}.{digest:x}\n".encode() + one)
        return b"".join(said)


def events_of(part: bytes) -> list[bytes]:
    """Server-sent events, one by one: JSON has no empty line."""
    return [one + b"\n\n" for one in part.split(b"\n\n")[:-1]]


def _joined(sums: Sequence[int]) -> int:
    return crc32(array("I", sums).tobytes())


def _mark(text: str) -> Mark:
    return Mark(_decimal(text.removesuffix("e")), text.endswith("e"))


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(text)
    return int(text)


def _hex(text: str) -> int:
    if not 0 < len(text) <= 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(text)
    return int(text, 16)
