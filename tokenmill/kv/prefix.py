"""PrefixIndex: one identity for a block's content, a hash chain over (parent, tokens, salt), and where it lives."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

IDENTITY_BYTES = 16


def root_identity(salt: str, adapter: str = "") -> bytes:
    """The parent of a first block. Another salt is another tree: tenants cannot see each other's cache."""
    return _digest(struct.pack("<II", len(salt.encode()), len(adapter.encode())), salt.encode(), adapter.encode())


def block_identity(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block of tokens that follows `parent`: the same on every device, disk and worker."""
    return _digest(parent, struct.pack(f"<{len(tokens)}I", *tokens))


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


class PrefixIndex:
    """Which block holds which content. One block per identity: the first to publish it stays."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, identity: bytes) -> int | None:
        return self._block_of.get(identity)

    def publish(self, identity: bytes, block: int) -> bool:
        """Returns whether the block now stands for the identity (False: another block already does)."""
        if identity in self._block_of or block in self._identity_of:
            return False
        self._block_of[identity] = block
        self._identity_of[block] = identity
        return True

    def forget(self, block: int) -> bool:
        identity = self._identity_of.pop(block, None)
        if identity is None:
            return False
        del self._block_of[identity]
        return True

    def blocks(self) -> list[int]:
        return list(self._identity_of)
