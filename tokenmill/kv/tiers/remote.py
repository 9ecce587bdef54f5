"""RemoteTier: the host memory of another engine, over TCP; what a prefill worker brings its blocks to."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tokenmill.kv.tiers.fabric import NixlFabric, address_of
from tokenmill.kv.tiers.listener import OFFERED, SECONDS
from tokenmill.kv.tiers.queued import Job, QueuedTier, ThreadBell
from tokenmill.kv.tiers.slots import Slots
from tokenmill.kv.tiers.wire import (
    ANSWER,
    DISCARD,
    FORGET,
    GET,
    HELLO_SECONDS,
    LARGEST_LIST,
    LEASE,
    LOOKUP,
    MEET,
    OFFER,
    OK,
    PUT,
    Connection,
    PeerError,
    introduce,
)
from tokenmill.kv.transport import BlockMemory, Checksum

REMEMBERED = 1 << 17  # identities that the peer is known to hold
WINDOW = 16  # blocks that are sent before the first answer is read
PAUSES = (0.1, 5.0)  # seconds until a peer that was not there is asked again: at first, and at most


class RemoteTier(QueuedTier):
    """One connection, made when it is first needed and again when it was lost; what the peer holds is remembered from
    its answers, so to look something up asks nobody. It may have lost what it is remembered to hold: then nothing
    arrives, and the block is computed."""

    finishes = True

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        namespace: bytes,
        memory: BlockMemory,
        checksum: Checksum,
        bell: ThreadBell,
        name: str = "peer",
        fabric: NixlFabric | None = None,
    ) -> None:
        self._fabric, self._offers = fabric, False  # whether the peer reads what it is offered
        self._address, self._secret, self._namespace = address, secret, namespace
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._asked: set[bytes] = set()  # of which it is not known whether it holds them
        self._peer: Connection | None = None
        self._pause, self._not_before = PAUSES[0], 0.0
        self._buffer = memory.allocate(WINDOW * memory.block_bytes)
        if fabric is not None:
            fabric.register(self._buffer)
        super().__init__(name, memory, Slots(), checksum, bell)

    def lookup(self, identities: Sequence[bytes]) -> int:
        """As far as is known; what is not is asked for, and known the next time."""
        with self.lock:
            for count, identity in enumerate(identities):
                if identity not in self._known:
                    unknown = [one for one in identities[count : count + 1024] if one not in self._asked]
                    if len(identities) > 1 and unknown and len(self._asked) < REMEMBERED:
                        self._look_later(unknown)
                    return count
            return len(identities)

    def _look_later(self, identities: list[bytes]) -> None:
        self._asked.update(identities)
        self._queue.put(lambda: self._quietly(lambda peer: self._look(peer, identities)))

    def lease(self, identities: Sequence[bytes], seconds: float) -> int:
        """For what is known to be there; the peer is told when its turn comes."""
        count = self.lookup(identities)
        body = SECONDS.pack(seconds) + b"".join(identities[:count])
        if count:
            self._queue.put(lambda: self._quietly(lambda peer: self._ask_peer(peer, LEASE, body)))
        return count

    def discard(self, identities: Sequence[bytes]) -> None:
        body = b"".join(identities)
        with self.lock:
            for identity in identities:
                self._known.pop(identity, None)
            for job in self._open.values():
                job.dropped.update(identities)
        self._queue.put(lambda: self._quietly(lambda peer: self._ask_peer(peer, DISCARD, body)))

    def forget(self, salt: str | None) -> None:
        with self.lock:
            self._known.clear()
            for job in self._open.values():
                if salt is None or job.salt == salt:
                    job.dropped.update(job.identities)
        body = b"" if salt is None else b"s" + salt.encode()
        self._queue.put(lambda: self._quietly(lambda peer: self._ask_peer(peer, FORGET, body)))

    def close(self) -> None:
        super().close()
        if self._peer is not None:
            self._peer.close()
        if self._fabric is not None:
            self._fabric.close()

    # In the thread

    def _claim(self, job: Job) -> None:
        """Nothing of it lies here."""

    def _do(self, job: Job) -> tuple[int, str | None]:
        try:
            peer = self._connect()
            return self._put(peer, job, job.salt) if job.salt is not None else self._get(peer, job)
        except PeerError as error:
            self._lost()
            return job.arrived, f"{self._address[0]}:{self._address[1]}: {error}"

    def _put(self, peer: Connection, job: Job, salt: str) -> tuple[int, str | None]:
        entries = list(zip(job.identities, job.blocks, strict=True))
        for at in range(0, len(entries), WINDOW):
            piece = [one for one in entries[at : at + WINDOW] if one[0] not in job.dropped]
            views = [self._view(number) for number in range(len(piece))]
            self.memory.gather([block for _, block in piece], views)
            for (identity, _), view in zip(piece, views):
                if self._offers:
                    offered = OFFERED.pack(identity, address_of(view), self.checksum(view))
                    peer.send(OFFER, offered + salt.encode())
                else:
                    peer.send(PUT, identity + salt.encode(), view)
            for identity, _ in piece:
                _, status, _ = peer.receive()
                job.arrived += status == OK
                if status == OK and identity not in job.dropped:
                    self._learn(identity, True)
        return job.arrived, None

    def _get(self, peer: Connection, job: Job) -> tuple[int, str | None]:
        entries = list(zip(job.identities, job.blocks, strict=True))
        for at in range(0, len(entries), WINDOW):
            piece = entries[at : at + WINDOW]
            for identity, _ in piece:
                peer.send(GET, identity)
            views: list[memoryview] = []
            gap: bytes | None = None
            for number, (identity, _) in enumerate(piece):
                _, status, length, header = peer.begin()
                view = self._view(number) if length == self.memory.block_bytes else memoryview(bytearray(length))
                peer.body(header, view)
                if (status != OK or length != self.memory.block_bytes) and gap is None:
                    gap = identity
                if gap is None:
                    views.append(view)
            self.memory.scatter([block for _, block in piece[: len(views)]], views)
            job.arrived += len(views)
            if gap is not None:
                self._learn(gap, False)
                return job.arrived, None
        return job.arrived, None

    def _look(self, peer: Connection, identities: list[bytes]) -> None:
        found = self._ask_peer(peer, LOOKUP, b"".join(identities))
        for identity, held in zip(identities, found):
            self._learn(identity, bool(held))
        with self.lock:
            self._asked.difference_update(identities)

    def _ask_peer(self, peer: Connection, kind: int, body: bytes) -> bytes:
        peer.send(kind, body)
        answered, _, found = peer.receive()
        if answered != ANSWER:
            raise PeerError("the peer answers something else")
        return found

    def _learn(self, identity: bytes, held: bool) -> None:
        with self.lock:
            if held:
                self._known[identity] = None
                self._known.move_to_end(identity)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            else:
                self._known.pop(identity, None)

    def _quietly(self, ask: Callable[[Connection], object]) -> None:
        try:
            ask(self._connect())
        except PeerError:
            self._lost()

    def _connect(self) -> Connection:
        if self._peer is not None:
            return self._peer
        if time.monotonic() < self._not_before:
            raise PeerError("the peer is not there")
        peer: socket.socket | None = None
        try:
            peer = socket.create_connection(self._address, timeout=HELLO_SECONDS)
            largest = max(LARGEST_LIST, self.memory.block_bytes)
            self._peer = introduce(peer, self._secret, self._namespace, largest, server=False)
        except (OSError, PeerError) as error:
            if peer is not None:
                peer.close()
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, PAUSES[1])
            raise error if isinstance(error, PeerError) else PeerError(f"nobody is there: {error}") from None
        self._pause = PAUSES[0]
        if self._fabric is not None:
            self._peer.send(MEET, self._fabric.describe())
            _, status, _ = self._peer.receive()
            self._offers = status == OK
        return self._peer

    def _lost(self) -> None:
        """Whoever comes back under the same name may hold nothing of what it held."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        with self.lock:
            self._known.clear()
            self._asked.clear()

    def _view(self, number: int) -> memoryview:
        size = self.memory.block_bytes
        return self._buffer[number * size : (number + 1) * size]
