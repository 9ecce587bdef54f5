"""KVManager: gives blocks to requests, finds cached prefixes, forks with copy-on-write, and takes blocks back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tokenmill.kv.moves import Move
from tokenmill.kv.pool import BlockPool
from tokenmill.kv.prefix import IdentityChains, PrefixIndex


class Holder(Protocol):
    """What the manager needs to know of a request (and may change)."""

    tokens: list[int]  # known tokens
    blocks: list[int]
    num_computed: int
    num_published: int  # leading blocks that are in the prefix index
    identities: list[bytes]  # of its full blocks, computed lazily
    salt: str
    last_step: int  # number of the newest step that computes some of its tokens
    in_float32: bool  # computed after all others of its steps: nobody shares what it fills


@dataclass
class CacheStats:
    """Prefix-cache counters, in tokens."""

    queried: int = 0
    hit: int = 0
    evicted_blocks: int = 0


class KVManager:
    """The only code that moves blocks between requests, the prefix index and the pool.

    A request's blocks:  [ in the prefix index, perhaps shared | full, its own | tail, its own ]
                         0                                     num_published                   len(blocks)
    Steps write only what lies after num_published, so shared blocks never change; a fork copies the tail.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self._chains = IdentityChains(block_size)
        self.pool = BlockPool(num_blocks, on_evict=self._evicted)
        self.stats = CacheStats()
        self._unproven: list[tuple[int, int]] = []  # (step, block): can be found, though the step is not done yet

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, request: Holder) -> list[int]:
        """Cached blocks that hold the request's first tokens; at least one token is left to compute."""
        if not self.prefix_caching:
            return []
        return self.index.find_leading(self._identities(request, (len(request.tokens) - 1) // self.block_size))

    def needed(self, hits: list[int], tokens: int) -> int:
        """Free blocks that starting a request of so many tokens on these hits takes out of the pool."""
        references = self.pool.references
        revived = sum([references[block] == 0 for block in hits])
        return self.blocks_for(tokens) - len(hits) + revived

    def admit(self, request: Holder, hits: list[int]) -> None:
        """Start the request on its cached prefix."""
        self.pool.share(hits)
        request.blocks = list(hits)
        request.num_computed = len(hits) * self.block_size
        request.num_published = len(hits)
        if self.prefix_caching:
            self.stats.queried += len(request.tokens)
            self.stats.hit += request.num_computed

    def grow(self, request: Holder, tokens: int) -> list[int] | None:
        """Take blocks until the request holds room for `tokens`; None (and nothing taken) if they do not fit."""
        missing = self.blocks_for(tokens) - len(request.blocks)
        if missing > self.pool.num_free:
            return None
        fresh = [self.pool.take() for _ in range(missing)]
        request.blocks += fresh
        return fresh

    def fork(self, parent: Holder, child: Holder, tokens: int) -> list[Move]:
        """Start `child` on the first `tokens` of `parent`: full blocks are shared, a partial one is copied.

        Returns what the next step moves first. The caller checked `num_free`.
        """
        whole, rest = divmod(tokens, self.block_size)
        for block in parent.blocks[:whole]:
            self.pool.references[block] += 1  # the parent holds one, so it is not in the free list
        child.blocks = parent.blocks[:whole]
        child.num_computed = tokens
        child.num_published = min(parent.num_published, whole)
        child.identities = parent.identities[: child.num_published]
        if not rest:
            return []
        copy = self.pool.take()
        child.blocks.append(copy)
        return [Move(parent.blocks[whole], copy)]

    def publish(self, request: Holder) -> None:
        """Offer the request's full blocks whose tokens are known to later requests."""
        if not self.prefix_caching or request.in_float32:
            return
        full = min(request.num_computed, len(request.tokens)) // self.block_size
        if full <= request.num_published:
            return
        identities = self._identities(request, full)
        for number in range(request.num_published, full):
            block = request.blocks[number]
            if self.index.publish(identities[number], block, request.salt):
                self.pool.mark_content(block, True)
                self._unproven.append((request.last_step, block))
        request.num_published = full

    def settle(self, step: int) -> None:
        """Step `step` and all before it are done: what they filled is there, what they read may be given away."""
        self._unproven = [entry for entry in self._unproven if entry[0] > step]
        self.pool.settle(step)

    def void(self, step: int) -> None:
        """Every launched step failed, the newest is `step`: nobody may find what they were to fill."""
        for _, block in self._unproven:
            if self.index.forget(block):
                self.pool.mark_content(block, False)
        self.settle(step)

    def forget(self, request: Holder) -> None:
        """Nobody may find what lies in the request's blocks."""
        for block in request.blocks:
            if self.index.forget(block):
                self.pool.mark_content(block, False)

    def release(self, request: Holder, fence: int) -> None:
        """Take back everything the request holds, once step `fence` is settled."""
        self.pool.release(request.blocks, fence)
        request.blocks = []
        request.num_computed = 0
        request.num_published = 0

    def reset_prefix_cache(self, salt: str | None = None) -> None:
        """Forget all cached content, or that of one salt; blocks in use stay in use."""
        for block in self.index.blocks(salt):
            self.index.forget(block)
            self.pool.mark_content(block, False)

    def check_integrity(self, requests: Iterable[Holder]) -> None:
        """Prove that no block is lost, leaked or doubly owned, and that the index and the pool agree."""
        self.pool.check_integrity([request.blocks for request in requests])
        known = set(self.index.blocks())
        marked = {block for block, has in enumerate(self.pool.has_content) if has}
        if known != marked:
            raise AssertionError(f"index and pool disagree about the content of blocks {sorted(known ^ marked)[:8]}")

    def _identities(self, request: Holder, full_blocks: int) -> list[bytes]:
        chain = request.identities
        if len(chain) < full_blocks:
            self._chains.extend(chain, request.salt, request.tokens, full_blocks)
        return chain if len(chain) == full_blocks else chain[:full_blocks]

    def _evicted(self, block: int) -> None:
        self.index.forget(block)
        self.stats.evicted_blocks += 1
