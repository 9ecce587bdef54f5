"""Transport: copies blocks, by identity, between the device and one other place, and never makes the loop wait."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

LAYOUT_VERSION = 1  # of a block's payload; another one is another namespace

Checksum = Callable[[memoryview], int]  # 32 bits


@dataclass(frozen=True)
class Done:
    """A ticket has ended: nothing of it touches a block any more."""

    ticket: int
    arrived: int  # of its blocks, how many leading ones are there, checksums included; of a write, how many were kept
    seconds: float = 0.0  # that the copying took, without the time in the queue
    failure: str | None = None  # why it is not all


class Transport(Protocol):
    """One place beside the device's memory. One thread calls it, and no call waits for a copy.

    From `read` or `write` until `poll` tells of the ticket the blocks belong to the transfer: nobody may give them to
    somebody else, and those that are read into hold anything. Every ticket ends. What a place cannot keep, it loses:
    whoever asks must be able to go on without.
    """

    name: str

    def lookup(self, identities: Sequence[bytes]) -> int:
        """How many leading ones are held here."""
        ...

    def read(self, identities: Sequence[bytes], blocks: Sequence[int]) -> int | None:
        """Start to copy what is held into these blocks; a ticket, or None: too much is waiting already."""
        ...

    def write(self, identities: Sequence[bytes], blocks: Sequence[int], salt: str) -> int | None:
        """Start to copy these blocks to here; a ticket, or None: too much is waiting already."""
        ...

    def lease(self, identities: Sequence[bytes], seconds: float) -> int:
        """Keep what is held for so long, whatever else comes; how many leading ones are."""
        ...

    def discard(self, identities: Sequence[bytes]) -> None:
        """These are not what they are named: nobody may find them, not even those that are on their way here."""
        ...

    def forget(self, salt: str | None) -> None:
        """Nobody may find what was written with this salt, or anything, not even what is on its way here."""
        ...

    def usage(self) -> tuple[int, int]:
        """Blocks that are held here, and that there is room for; 0 and 0: only somebody else knows."""
        ...

    def poll(self) -> list[Done]:
        """Tickets that have ended since the last time."""
        ...

    def close(self) -> None:
        """End what is under way. Blocks may be touched until this returns, and not afterwards."""
        ...


class BlockMemory(Protocol):
    """The device's blocks as bytes: the one thing that a transport needs to know of the device.

    Both verbs return when the copy is made; they are called from threads of transports, several at once.
    """

    block_bytes: int  # of a block: all layers, keys and values, scales, and what other models keep there

    def gather(self, blocks: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copy blocks to where `block_bytes` of each are to lie."""
        ...

    def scatter(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Copy them back."""
        ...

    def allocate(self, size: int) -> memoryview:
        """Bytes that the device copies to and from at full speed; aligned to a page."""
        ...


@dataclass(frozen=True)
class Namespace:
    """What blocks must have in common besides their identities, which name tokens, a salt and what changes their KV."""

    weights: str  # digest of what was computed with
    kv_form: str  # dtypes and shapes of a block
    block_size: int
    checksum: str  # how it is made
    layout: int = LAYOUT_VERSION
    digest: bytes = field(init=False)  # 16 bytes

    def __post_init__(self) -> None:
        parts = (self.weights, self.kv_form, str(self.block_size), self.checksum, str(self.layout))
        hashed = hashlib.blake2b(digest_size=16)
        for part in parts:
            hashed.update(len(part.encode()).to_bytes(4, "little") + part.encode())
        object.__setattr__(self, "digest", hashed.digest())
