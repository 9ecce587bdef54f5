"""TierListener: lets peers who know the secret put blocks into this engine's host memory, and fetch them from there."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time

from tokenmill.kv.tiers.fabric import NixlFabric, StillCopying
from tokenmill.kv.tiers.host import HostTier
from tokenmill.kv.tiers.wire import (
    ANSWER,
    DISCARD,
    FORGET,
    FULL,
    GET,
    IDENTITY,
    LARGEST_LIST,
    LEASE,
    LOOKUP,
    MEET,
    NO,
    OFFER,
    OK,
    PUT,
    Connection,
    PeerError,
    introduce,
    split,
)

log = logging.getLogger("tokenmill.kv")

MOST_PEERS = 16
PUT_SECONDS = 60.0  # that a block which was brought here stays, whatever else comes: its request is on its way
LONGEST_LEASE = 600.0
LEASED_SHARE = 0.5  # of the slots that may be kept for requests on their way
SECONDS = struct.Struct("<d")
OFFERED = struct.Struct("<16sQI")  # identity, address in the peer's memory, checksum; then the salt


class TierListener:
    """A thread per peer.

    What a peer sends is read straight into a slot that nobody finds before its code is right, so a peer that dies in
    the middle, or comes back under the same name, leaves nothing behind.
    """

    def __init__(
        self,
        tier: HostTier,
        address: tuple[str, int],
        secret: bytes,
        namespace: bytes,
        fabric: NixlFabric | None = None,  # for peers that have one, too
    ) -> None:
        self.fabric = fabric
        if fabric is not None:
            fabric.register(tier.memory_of_slots)
        self.tier, self._secret, self._namespace = tier, secret, namespace
        self._size = tier.memory.block_bytes
        self._socket = socket.create_server(address, backlog=MOST_PEERS)
        self.address = self._socket.getsockname()[:2]
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.received = self.refused = 0
        self._thread = threading.Thread(target=self._accept, name="kv-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            open_ones = [self._socket, *self._peers]
        for one in open_ones:
            with contextlib.suppress(OSError):  # it is closed already
                one.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        self._socket.close()
        self._thread.join(5)
        if self.fabric is not None:
            self.fabric.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.1)  # out of descriptors, perhaps: others may close theirs
                continue
            with self._lock:
                full = len(self._peers) >= MOST_PEERS
                if not full:
                    self._peers.add(peer)
            if full:
                peer.close()
            else:
                threading.Thread(target=self._serve, args=(peer,), name="kv-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        met: list[bytes] = []  # what the peer is called in the fabric
        try:
            largest = max(LARGEST_LIST, self._size + 1024)
            with_peer = introduce(peer, self._secret, self._namespace, largest, server=True)
            while True:
                self._answer(with_peer, met)
        except PeerError as error:
            if not self._closed.is_set() and "is gone" not in str(error):
                log.warning("kv peer: %s; it was sent away", error)
        except (OSError, ValueError, struct.error) as error:
            if not self._closed.is_set():
                log.warning("kv peer: %s", error)
        finally:
            peer.close()
            for name in met:
                assert self.fabric is not None
                self.fabric.part(name)
            with self._lock:
                self._peers.discard(peer)

    def _answer(self, peer: Connection, met: list[bytes]) -> None:
        kind, _, length, header = peer.begin(forever=True)
        if kind == PUT:
            self._put(peer, length, header)
            return
        if length > LARGEST_LIST:
            raise PeerError("the peer sent a frame that no peer sends")
        body = bytearray(length)
        peer.body(header, memoryview(body))
        asked = bytes(body)
        if kind == GET:
            self._get(peer, asked)
        elif kind == MEET:
            if self.fabric is not None:
                met.append(self.fabric.meet(asked))
            peer.send(ANSWER, status=NO if self.fabric is None else OK)
        elif kind == OFFER and met:
            self._take(peer, asked, met[-1])
        elif kind == LOOKUP:
            names = split(asked)
            with self.tier.lock:
                found = bytes(name in self.tier.slots for name in names)
            peer.send(ANSWER, found)
        elif kind == LEASE:
            seconds = min(SECONDS.unpack(asked[: SECONDS.size])[0], LONGEST_LEASE)
            count = self.tier.lease(split(asked[SECONDS.size :]), seconds)
            peer.send(ANSWER, count.to_bytes(4, "little"))
        elif kind == DISCARD:
            self.tier.discard(split(asked))
            peer.send(ANSWER)
        elif kind == FORGET:
            self.tier.forget(asked[1:].decode() if asked[:1] == b"s" else None)
            peer.send(ANSWER)
        else:
            raise PeerError("the peer asks for something that is not known here")

    def _put(self, peer: Connection, length: int, header: bytes) -> None:
        """identity, bytes of the salt, salt, block."""
        known = length - self._size
        if not IDENTITY <= known <= IDENTITY + 512:
            raise PeerError("the peer's blocks are of another size")
        about = memoryview(bytearray(known))
        # Where the block goes has to be known before what it is: both are read at once, and judged together.
        slot, status = self._slot()
        target = self.tier.slot(slot) if slot is not None else memoryview(bytearray(self._size))
        identity, salt, kept = b"", "", False
        try:
            peer.body(header, about, target)
            identity, salt = bytes(about[:IDENTITY]), bytes(about[IDENTITY:]).decode()
            if slot is not None:
                self.tier.set_sum(slot)
                kept = True
        finally:
            if slot is not None:
                self._end(identity, salt, slot, kept)
        peer.send(ANSWER, status=status)

    def _take(self, peer: Connection, asked: bytes, name: bytes) -> None:
        """Read an offered block from the peer's memory."""
        assert self.fabric is not None
        identity, address, checksum = OFFERED.unpack(asked[: OFFERED.size])
        salt = asked[OFFERED.size :].decode()
        slot, status = self._slot()
        if slot is None:
            peer.send(ANSWER, status=status)
            return
        kept = copying = False
        try:
            self.fabric.read(name, address, self.tier.slot(slot))
            self.tier.set_sum(slot)
            kept = self.tier.sum_of(slot) == checksum
        except StillCopying:
            copying = True  # the slot is lost: somebody may write to it at any time
            raise PeerError("a copy from the peer's memory cannot be ended") from None
        finally:
            if not copying:
                self._end(identity, salt, slot, kept)
        peer.send(ANSWER, status=OK if kept else NO)

    def _end(self, identity: bytes, salt: str, slot: int, kept: bool) -> None:
        with self.tier.lock:
            if kept:
                self.tier.slots.keep(identity, salt, slot)
                self.tier.slots.lease(identity, time.monotonic() + PUT_SECONDS)
                self.received += 1
            else:
                self.tier.slots.give_back(slot)

    def _slot(self) -> tuple[int | None, int]:
        now = time.monotonic()
        with self.tier.lock:
            slots = self.tier.slots
            slot = slots.take("", now) if slots.num_leased(now) < LEASED_SHARE * slots.count else None
        self.refused += slot is None
        return slot, OK if slot is not None else FULL

    def _get(self, peer: Connection, identity: bytes) -> None:
        with self.tier.lock:
            slot = self.tier.slots.use(identity)
        if slot is None:
            peer.send(ANSWER, status=NO)
            return
        try:
            if self.tier.is_whole(slot):
                peer.send(ANSWER, self.tier.slot(slot))
            else:
                peer.send(ANSWER, status=NO)
        finally:
            with self.tier.lock:
                self.tier.slots.done(identity, slot)
