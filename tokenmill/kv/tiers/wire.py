"""What two engines say to each other about blocks: frames of bounded length that only who knows the secret can make."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time

PROTOCOL = b"tokenKV1"
HELLO_SECONDS, FRAME_SECONDS = 5.0, 10.0  # that a peer may take for its introduction, and to go on with a frame
LARGEST_LIST = 1 << 20  # bytes of a frame that carries no block
IDENTITY = 16

PUT, GET, LOOKUP, LEASE, DISCARD, FORGET, ANSWER, MEET, OFFER = range(1, 10)
_HEADER = struct.Struct("<BBIQ")  # kind, status, bytes of the body, number of the frame
_MAC = 16
OK, NO, FULL = 0, 1, 2  # statuses of answers


class PeerError(Exception):
    """The other side is not what it should be, or is gone; the message is what is told."""


class Connection:
    """A socket after both sides have proven that they know the secret.

    A frame's code is made over its header, its number and all it carries with a key of this connection, so nothing can
    be altered, left out or sent twice without its being noticed. Nothing is encrypted.
    """

    def __init__(self, peer: socket.socket, key: bytes, largest: int, server: bool) -> None:
        self._socket, self._largest = peer, largest
        self._out_key = hashlib.blake2b(b"server" if server else b"client", key=key).digest()
        self._in_key = hashlib.blake2b(b"client" if server else b"server", key=key).digest()
        self._sent = self._received = 0
        peer.settimeout(FRAME_SECONDS)

    def send(self, kind: int, *parts: bytes | memoryview, status: int = OK) -> None:
        header = _HEADER.pack(kind, status, sum(len(part) for part in parts), self._sent)
        self._sent += 1
        mac = hashlib.blake2b(header, key=self._out_key, digest_size=_MAC)
        for part in parts:
            mac.update(part)
        try:
            for part in (header, *parts, mac.digest()):
                self._socket.sendall(part)
        except OSError as error:
            raise PeerError(f"the peer is gone: {error}") from None

    def begin(self, forever: bool = False) -> tuple[int, int, int, bytes]:
        """Kind, status, length of the body and the header of the next frame; its body is still to be read.

        forever: the peer may have nothing to say for hours.
        """
        self._socket.settimeout(None if forever else FRAME_SECONDS)
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        self._socket.settimeout(FRAME_SECONDS)
        kind, status, length, number = _HEADER.unpack(header)
        if number != self._received or length > self._largest:
            raise PeerError("the peer sent a frame that no peer sends")
        self._received += 1
        return kind, status, length, bytes(header)

    def body(self, header: bytes, *targets: memoryview) -> None:
        """Fill the targets with the body; what they hold is nothing before this has returned."""
        mac = hashlib.blake2b(header, key=self._in_key, digest_size=_MAC)
        for target in targets:
            self._fill(target)
            mac.update(target)
        code = bytearray(_MAC)
        self._fill(memoryview(code))
        if not hmac.compare_digest(mac.digest(), bytes(code)):
            raise PeerError("what the peer sent was changed on its way")

    def receive(self) -> tuple[int, int, bytes]:
        """A whole frame: kind, status and body."""
        kind, status, length, header = self.begin()
        body = bytearray(length)
        self.body(header, memoryview(body))
        return kind, status, bytes(body)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, target: memoryview) -> None:
        fill(self._socket, target)


def fill(peer: socket.socket, target: memoryview, until: float | None = None) -> None:
    """until: by the monotonic clock, when all of it must be there; None: the socket's timeout holds for each part."""
    done = 0
    while done < len(target):
        try:
            if until is not None:
                peer.settimeout(max(1e-3, until - time.monotonic()))
            count = peer.recv_into(target[done:])
        except TimeoutError:
            raise PeerError("the peer says nothing any more") from None
        except OSError as error:
            raise PeerError(f"the peer is gone: {error}") from None
        if not count:
            raise PeerError("the peer is gone")
        done += count


def introduce(peer: socket.socket, secret: bytes, namespace: bytes, largest: int, server: bool) -> Connection:
    """Both sides say what they compute with and prove, with numbers that are used once, that they know the secret."""
    until = time.monotonic() + HELLO_SECONDS  # for all of it: strangers keep no place by saying a byte now and then
    peer.settimeout(HELLO_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = os.urandom(32)
    theirs = bytearray(len(PROTOCOL) + 32)
    try:
        peer.sendall(PROTOCOL + mine)
    except OSError as error:
        raise PeerError(f"the peer is gone: {error}") from None
    fill(peer, memoryview(theirs), until)
    if not theirs.startswith(PROTOCOL):
        raise PeerError("the peer is no tokenmill, or one of another version")
    nonces = (mine, bytes(theirs[len(PROTOCOL) :]))
    both = b"".join(nonces if server else reversed(nonces))

    def proof(role: bytes) -> bytes:
        return hmac.digest(secret, role + both, "sha256")

    try:
        peer.sendall(proof(b"server" if server else b"client") + namespace)
    except OSError as error:
        raise PeerError(f"the peer is gone: {error}") from None
    answer = bytearray(32 + len(namespace))
    fill(peer, memoryview(answer), until)
    if not hmac.compare_digest(bytes(answer[:32]), proof(b"client" if server else b"server")):
        raise PeerError("the peer does not know the secret")
    if bytes(answer[32:]) != namespace:
        raise PeerError("the peer computes with another model, another form of KV, or another version")
    return Connection(peer, proof(b"session"), largest, server)


def split(identities: bytes) -> list[bytes]:
    return [identities[at : at + IDENTITY] for at in range(0, len(identities) // IDENTITY * IDENTITY, IDENTITY)]


def address_of(text: str) -> tuple[str, int]:
    """host:port; raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not 0 <= int(port) < 65536:
        raise ValueError(text)
    return host.strip("[]"), int(port)
