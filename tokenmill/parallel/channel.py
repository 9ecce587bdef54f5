"""Channel: a socket between two ranks, as frames with codes that are read ahead of being asked for."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections import deque

from tokenmill.peers import PeerError

LARGEST = 1 << 20  # bytes of a frame; longer tensors go in several
READ_AHEAD = 64 << 20  # bytes that wait here to be asked for, after which no more are read; frames are shorter

_HEADER = struct.Struct("<BBQQ")  # verb, group, bytes of the body, number of the frame
_MAC = 16
_READ = 1 << 18  # bytes at once
_VIEWS = 64  # at once


class Channel:
    """One rank's end. Nothing in it waits: whoever has it looks when the socket can be read or written.

    Every frame says which call it belongs to, so ranks that ask for different things are told so. Its code is made over
    that, its number and its body with a key of this connection. Nothing is encrypted.
    """

    def __init__(self, peer: socket.socket, key: bytes, first: bool) -> None:
        """Takes the socket over. first: this is the rank with the lower number of the two."""
        self.socket = peer
        self._out_key = hashlib.blake2b(b"first" if first else b"second", key=key).digest()
        self._in_key = hashlib.blake2b(b"second" if first else b"first", key=key).digest()
        self._sent = self._received = 0
        self._unsent: deque[memoryview] = deque()
        self._inbox, self._at = bytearray(), 0  # what was read, and how much of that was taken
        peer.setblocking(False)
        if peer.family != getattr(socket, "AF_UNIX", None):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, verb: int, group: int, data: memoryview) -> None:
        """What `flush` sends. The data must stay as it is until then."""
        for begin in range(0, max(len(data), 1), LARGEST):
            piece = data[begin : begin + LARGEST]
            header = _HEADER.pack(verb, group, len(piece), self._sent)
            self._sent += 1
            mac = hashlib.blake2b(header, key=self._out_key, digest_size=_MAC)
            mac.update(piece)
            self._unsent.extend(memoryview(part) for part in (header, piece, mac.digest()) if len(part))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def has_room(self) -> bool:
        return len(self._inbox) - self._at < READ_AHEAD

    def flush(self) -> bool:
        """Send what the socket takes now. Whether that was all. Raises OSError."""
        while self._unsent:
            try:
                count = self.socket.sendmsg([self._unsent[n] for n in range(min(_VIEWS, len(self._unsent)))])
            except BlockingIOError:
                return False
            while count:
                part = self._unsent.popleft()
                if count < len(part):
                    self._unsent.appendleft(part[count:])
                count -= min(count, len(part))
        return True

    def fill(self) -> None:
        """Read what is there. Raises OSError, and PeerError when nothing more can come."""
        while self.has_room:
            try:
                data = self.socket.recv(_READ)
            except BlockingIOError:
                return
            if not data:
                raise PeerError("it is gone")
            self._inbox += data
            if len(data) < _READ:
                return

    def take(self, verb: int, group: int, into: memoryview, done: int) -> int | None:
        """Fill more of a tensor's bytes, of which some are there: how many are after that; None: no whole frame has
        come. Raises PeerError."""
        if len(self._inbox) - self._at < _HEADER.size:
            return None
        header = bytes(self._inbox[self._at : self._at + _HEADER.size])
        theirs, of, length, number = _HEADER.unpack(header)
        wanted = min(len(into) - done, LARGEST)
        if number != self._received or length > LARGEST:
            raise PeerError("it sent a frame that no rank sends")
        if (theirs, of, length) != (verb, group, wanted):
            raise PeerError(f"it sent {length} bytes of call {theirs}:{of} where {wanted} of {verb}:{group} come next")
        body = self._at + _HEADER.size
        if len(self._inbox) < body + length + _MAC:
            return None
        with memoryview(self._inbox) as inbox:
            mac = hashlib.blake2b(header, key=self._in_key, digest_size=_MAC)
            mac.update(inbox[body : body + length])
            if not hmac.compare_digest(mac.digest(), bytes(inbox[body + length : body + length + _MAC])):
                raise PeerError("what it sent was changed on its way")
            into[done : done + length] = inbox[body : body + length]
        self._received += 1
        self._at = body + length + _MAC
        if self._at > _READ or self._at == len(self._inbox):
            del self._inbox[: self._at]
            self._at = 0
        return done + int(length)

    def close(self) -> None:
        self.socket.close()
