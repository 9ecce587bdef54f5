"""FrameReader: the frames of a routed stream, out of bytes as they come; and how far the stream has come with them."""

from __future__ import annotations

import msgspec

from tokenmill.serve.http.routed import Progress, Told
from tokenmill.serve.router.client import ReplicaLost

MOST_LINE = 16 << 20  # bytes: the facts of many log-probabilities are long

_decode = msgspec.json.Decoder(Told).decode


class FrameReader:
    """What is not whole yet is kept back: a replica that dies in the middle of a frame has not said it."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[Told, bytes]]:
        """Raises ReplicaLost where these are no frames."""
        self._data += data
        found, at = [], 0
        while (end := self._data.find(b"\n", at)) >= 0:
            size, _, facts = bytes(self._data[at:end]).partition(b" ")
            if not size.startswith(b":") or not size[1:].isdigit():
                raise ReplicaLost("the replica's stream has no frames")
            first, last = end + 1, end + 1 + int(size[1:])
            if len(self._data) < last:
                break
            try:
                found.append((_decode(facts), bytes(self._data[first:last])))
            except ValueError as error:
                raise ReplicaLost(f"the facts of a frame cannot be read: {error}") from None
            at = last
        del self._data[:at]
        if len(self._data) > MOST_LINE:
            raise ReplicaLost("a frame of the replica's stream does not end")
        return found


def extend(progress: Progress, told: Told) -> None:
    """A frame was sent on."""
    progress.started |= told.start
    progress.numbered = max(progress.numbered, told.numbered)
    for number, more in told.sequences.items():
        if number in progress.sequences:
            progress.sequences[number].extend(more)
        else:
            progress.sequences[number] = more
