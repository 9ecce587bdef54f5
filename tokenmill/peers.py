"""Two processes that know one secret: how each proves that to the other, and the frames that they exchange then."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from pathlib import Path

from tokenmill.errors import ConfigError

HELLO_SECONDS, FRAME_SECONDS = 5.0, 10.0  # that a peer may take for its introduction, and to go on with a frame
LEAST_SECRET = 16  # bytes
IDLE, AGAIN, PROBES = 10, 5, 3  # seconds of silence until a kernel asks another whether it is there, and how often
UNACKNOWLEDGED = 30_000  # milliseconds after which what was sent is taken for lost, with the peer

_HEADER = struct.Struct("<BBIQ")  # kind, status, bytes of the body, number of the frame
_MAC = 16
_SHORT = 1 << 16  # bytes of a frame that is sent in one piece
OK = 0  # the status of a frame that says nothing else


class PeerError(Exception):
    """The other side is not what it should be, or is gone; the message is what is told."""


class Connection:
    """A socket after both sides have proven that they know the secret.

    A frame's code is made over its header, its number and all it carries with a key of this connection, so nothing can
    be altered, left out or sent twice without its being noticed. Nothing is encrypted.
    """

    def __init__(self, peer: socket.socket, key: bytes, largest: int, server: bool) -> None:
        """largest: bytes of a body."""
        self._socket, self._key, self._largest = peer, key, largest
        self._patience: float | None = FRAME_SECONDS
        self._out_key = hashlib.blake2b(b"server" if server else b"client", key=key).digest()
        self._in_key = hashlib.blake2b(b"client" if server else b"server", key=key).digest()
        self._sent = self._received = 0
        peer.settimeout(self._patience)

    def send(self, kind: int, *parts: bytes | memoryview, status: int = OK) -> None:
        header = _HEADER.pack(kind, status, sum(len(part) for part in parts), self._sent)
        self._sent += 1
        mac = hashlib.blake2b(header, key=self._out_key, digest_size=_MAC)
        for part in parts:
            mac.update(part)
        try:
            if len(header) + sum(map(len, parts)) < _SHORT:
                self._socket.sendall(b"".join((header, *parts, mac.digest())))
                return
            for part in (header, *parts, mac.digest()):
                self._socket.sendall(part)
        except OSError as error:
            raise PeerError(f"the peer is gone: {error}") from None

    def begin(self, forever: bool = False) -> tuple[int, int, int, bytes]:
        """Kind, status, length of the body and the header of the next frame; its body is still to be read.

        forever: the peer may have nothing to say for hours.
        """
        if forever:
            self._socket.settimeout(None)
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        if forever:
            self._socket.settimeout(self._patience)
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

    def be_patient(self) -> None:
        """Wait for the peer however long it takes, in frames, too: somebody else judges whether it is there, and hangs
        up from another thread. A machine that vanished without a word is found out by the kernel."""
        self._patience = None
        self._socket.settimeout(None)
        _watch_peer(self._socket)

    @property
    def here(self) -> str:
        """This side's own address. Raises PeerError."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError as error:
            raise PeerError(f"the peer is gone: {error}") from None

    def hang_up(self) -> None:
        """For whoever waits for the peer in another thread."""
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> tuple[socket.socket, bytes]:
        """The socket and the key, for those who go on in another form. Nothing more is said here."""
        return self._socket, self._key

    def close(self) -> None:
        self._socket.close()

    def _fill(self, target: memoryview) -> None:
        fill(self._socket, target)


def _watch_peer(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is no TCP connection, or gone already: whoever reads is told so
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = ("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", AGAIN), ("TCP_KEEPCNT", PROBES)
        for name, value in (*options, ("TCP_USER_TIMEOUT", UNACKNOWLEDGED)):
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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


def introduce(
    peer: socket.socket, secret: bytes, namespace: bytes, largest: int, server: bool, *, protocol: bytes, others: str
) -> Connection:
    """Both sides say what they compute with and prove, with numbers that are used once, that they know the secret.

    others: whom one with another namespace is said to be.
    """
    until = time.monotonic() + HELLO_SECONDS  # for all of it: strangers keep no place by saying a byte now and then
    peer.settimeout(HELLO_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = os.urandom(32)
    theirs = bytearray(len(protocol) + 32)
    try:
        peer.sendall(protocol + mine)
    except OSError as error:
        raise PeerError(f"the peer is gone: {error}") from None
    fill(peer, memoryview(theirs), until)
    if not theirs.startswith(protocol):
        raise PeerError("the peer is no tokenmill, or one of another version")
    nonces = (mine, bytes(theirs[len(protocol) :]))
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
        raise PeerError(others)
    return Connection(peer, proof(b"session"), largest, server)


def address_of(text: str) -> tuple[str, int]:
    """host:port; raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not 0 <= int(port) < 65536:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def read_secret(path: str, setting: str) -> bytes:
    """From the file that a setting names."""
    try:
        found = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting} is {path!r}, which cannot be read: {error.strerror}") from None
    if len(found) < LEAST_SECRET:
        raise ConfigError(f"{setting} {path!r} holds {len(found)} bytes; a secret has at least {LEAST_SECRET}")
    return found
