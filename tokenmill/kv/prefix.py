"""PrefixIndex: one identity for a block's content, a hash chain over (parent, tokens, salt), and where it lives."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from tokenmill.kv.events import CacheLog

IDENTITY_BYTES = 16


def root_identity(salt: str, adapter: str = "", pruning: str = "") -> bytes:
    """The parent of a first block. Another salt is another tree: tenants cannot see each other's cache.

    The same holds for an adapter, which is named by what its files say; and for what pruning drops, because keys and
    values of a token depend on which tokens it has seen.
    """
    lengths = struct.pack("<II", len(salt.encode()), len(adapter.encode()))
    return _digest(lengths + salt.encode() + adapter.encode() + pruning.encode())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=IDENTITY_BYTES).digest()


class IdentityChains:
    """Names full blocks of tokens, each by its parent's name and its own tokens: the same on every device and worker.

    Sequences that begin as the one before are not hashed again there.
    """

    def __init__(self, block_size: int, pruning: str = "") -> None:
        self._block_size, self._pruning = block_size, pruning
        self._last: tuple[bytes, bytes, list[bytes]] = b"", b"", []  # root, packed tokens, chain of the last new one

    def extend(self, chain: list[bytes], salt: str, tokens: Sequence[int], count: int, adapter: str = "") -> None:
        """Append identities to a chain until it names the first `count` blocks of `tokens`."""
        is_new = not chain
        packed = array("I", tokens[len(chain) * self._block_size : count * self._block_size])
        if sys.byteorder == "big":
            packed.byteswap()
        words, size = packed.tobytes(), 4 * self._block_size
        root = b""
        if is_new:
            root = root_identity(salt, adapter, self._pruning)
            chain += self._known_beginning(root, words, size)
        parent = chain[-1] if chain else root
        for at in range(len(chain) * size if is_new else 0, len(words), size):
            parent = _digest(parent + words[at : at + size])
            chain.append(parent)
        if is_new:
            self._last = root, words, chain[:]

    def _known_beginning(self, root: bytes, words: bytes, size: int) -> list[bytes]:
        """Identities of the blocks that these words have in common with the last new sequence."""
        last_root, last_words, last_chain = self._last
        if root != last_root:
            return []
        low, high = 0, min(len(words), len(last_words)) // size
        while low < high:
            middle = (low + high + 1) // 2
            if words[: middle * size] == last_words[: middle * size]:
                low = middle
            else:
                high = middle - 1
        return last_chain[:low]


class PrefixIndex:
    """Which block holds which content. One block per identity: the first to publish it stays."""

    log: CacheLog | None = None  # where changes are noted; None: nobody wants to know

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._salt_of: dict[int, str] = {}
        self._blocks_of: dict[str, set[int]] = {}  # by salt: to wipe one costs nothing of what others have

    def __len__(self) -> int:
        return len(self._block_of)

    def find_leading(self, identities: list[bytes]) -> list[int]:
        """The blocks of these identities up to the first that is unknown."""
        found: list[int] = []
        get = self._block_of.get
        for identity in identities:
            if (block := get(identity)) is None:
                break
            found.append(block)
        return found

    def block_of(self, identity: bytes) -> int | None:
        return self._block_of.get(identity)

    def publish(self, identity: bytes, block: int, salt: str = "") -> bool:
        """Returns whether the block now stands for the identity (False: another block already does)."""
        if identity in self._block_of or block in self._identity_of:
            return False
        self._block_of[identity] = block
        self._identity_of[block] = identity
        self._salt_of[block] = salt
        self._blocks_of.setdefault(salt, set()).add(block)
        if self.log is not None:
            self.log.stored(identity)
        return True

    def forget(self, block: int) -> bool:
        identity = self._identity_of.pop(block, None)
        if identity is None:
            return False
        del self._block_of[identity]
        salt = self._salt_of.pop(block)
        own = self._blocks_of[salt]
        own.discard(block)
        if not own:
            del self._blocks_of[salt]
        if self.log is not None:
            self.log.evicted(identity)
        return True

    def identities(self) -> list[bytes]:
        return list(self._block_of)

    def name_of(self, block: int) -> tuple[bytes, str] | None:
        """Its identity and salt, if it stands for one."""
        identity = self._identity_of.get(block)
        return None if identity is None else (identity, self._salt_of[block])

    def blocks(self, salt: str | None = None) -> list[int]:
        """Those with content, or with that of one salt."""
        return list(self._identity_of if salt is None else self._blocks_of.get(salt, ()))
