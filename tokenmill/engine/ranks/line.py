"""Line: what an engine and a machine with ranks of it tell each other: words as JSON, steps, that they are there."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from tokenmill.engine.ranks.orders import Order
from tokenmill.peers import OK, Connection, PeerError

PATIENCE = 45.0  # seconds in which nothing is heard of a machine that is there
BEAT_EVERY = 1.0  # seconds
LARGEST = 1 << 20  # bytes of a frame; longer steps go in several
MOST = 1 << 30  # bytes of a step

_WORD, _STEP, _BEAT = 1, 2, 3
_MORE = 1  # the status of a frame whose step goes on in the next one
_NUMBER = struct.Struct("<Q")


class Line:
    """One end. Any thread may tell something; one reads.

    Both say every second that they are there, with `beat()`. Where nothing has been heard for `patience` seconds in
    which this process ran itself, the line ends, and so does every wait on it.
    """

    def __init__(
        self, connection: Connection, patience: float = PATIENCE, beat: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.why = ""  # it ended
        self.beat: dict[str, Any] = {}  # the last one of the other side
        self._connection, self._patience, self._my_beat = connection, patience, beat
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._heard = False
        connection.be_patient()
        for work in (self._tell_beats, self._watch):
            threading.Thread(target=work, name="rank-line", daemon=True).start()

    def tell(self, word: Order) -> None:
        """Nobody hears it where the line has ended: whoever reads is told so."""
        self._send(_WORD, json.dumps(word).encode())

    def send_step(self, generation: int, message: bytes) -> None:
        head = _NUMBER.pack(generation)
        with self._lock:
            for begin in range(0, max(len(message), 1), LARGEST // 2):
                piece = message[begin : begin + LARGEST // 2]
                more = begin + len(piece) < len(message)
                if not self._send_now(_STEP, head + piece, _MORE if more else OK):
                    return

    def next(self) -> Order | tuple[int, bytes] | None:
        """A word, or a step with its generation; None: the line has ended, and `why` says how."""
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                kind, status, body = self._connection.receive()
                self._heard = True
                if kind == _BEAT:
                    self.beat = _read(body)
                elif kind == _WORD:
                    return _read(body)
                elif kind == _STEP and len(body) >= _NUMBER.size:
                    parts.append(body[_NUMBER.size :])
                    size += len(body)
                    if size > MOST:
                        raise PeerError("the peer sent a step that no engine sends")
                    if status != _MORE:
                        return _NUMBER.unpack_from(body)[0], b"".join(parts)
                else:
                    raise PeerError("the peer says something that is not known here")
        except PeerError as error:
            self.end(str(error))
            self._connection.close()
            return None

    def end(self, why: str = "it was ended here") -> None:
        """Any thread may; whoever reads goes on to close it."""
        self.why = self.why or why
        self._over.set()
        self._connection.hang_up()

    def _send(self, kind: int, body: bytes) -> None:
        with self._lock:
            self._send_now(kind, body, OK)

    def _send_now(self, kind: int, body: bytes, status: int) -> bool:
        try:
            self._connection.send(kind, body, status=status)
        except PeerError as error:
            self.end(str(error))
        return not self._over.is_set()

    def _tell_beats(self) -> None:
        while not self._over.wait(min(BEAT_EVERY, self._patience / 4)):
            self._send(_BEAT, json.dumps(self._my_beat()).encode())

    def _watch(self) -> None:
        tick, silent = min(BEAT_EVERY, self._patience / 10), 0.0
        before = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            passed, before = now - before, now
            silent += min(passed, 2 * tick)  # else this process did not run itself, which proves nothing
            if self._heard:
                self._heard, silent = False, 0.0
            if silent >= self._patience:
                self.end(f"nothing was heard of it for {self._patience:g} s")


def _read(body: bytes) -> dict[str, Any]:
    try:
        word = json.loads(body)
    except ValueError:
        word = None
    if not isinstance(word, dict):
        raise PeerError("the peer says something that is not known here")
    return word
