"""EvictionPolicy: what pool and manager tell a policy and ask it, and the books that all policies keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

NO_BLOCK = -1


@dataclass
class EvictionStats:
    """Counters in blocks. Those of the shadow stay 0 where a policy has none."""

    hits: int = 0  # cached blocks that nobody held and a newcomer found
    evictions: int = 0
    shadow_hits: float = 0.0  # what LRU would have found in their place
    takeovers: int = 0  # times that LRU was let decide because it would have found more


class EvictionPolicy(ABC):
    """Chooses among cached blocks without a reference; the children of a block go before it.

    The manager says what content is (`stored`, `asked`), the pool where blocks are: `freed` when the last reference of
    a block with content is given back, `held` when it gets one again, `victim` when memory is needed, `gone` when
    content is forgotten for another reason. A policy holds no references, and knows blocks only from `stored` to
    `victim` or `gone`. The pool keeps its free list in LRU order whatever the policy is.
    """

    def __init__(self, name: str, about: str, num_blocks: int) -> None:
        self.name = name
        self.about = about
        self.stats = EvictionStats()
        self.is_free = [False] * num_blocks  # content, and no reference
        self.kids = [0] * num_blocks  # cached blocks that go on from it
        self._parent = [NO_BLOCK] * num_blocks
        self._serial = [0] * num_blocks  # of its content; 0: none
        self._parent_serial = [0] * num_blocks  # tells a parent from what later lies in the same block
        self._stored = 0
        # Rings of blocks through two arrays, as in the pool. Their heads are numbers beyond the blocks.
        self._num_blocks = num_blocks
        self._next = list(range(num_blocks))
        self._prev = list(range(num_blocks))
        self._spare_heads: list[int] = []

    @abstractmethod
    def describe(self, block: int, identity: bytes, depth: int, answer: bool, salt: str, fresh: int) -> None:
        """A block has new content: `depth` blocks lie before it, and its request computes `fresh` or so."""

    @abstractmethod
    def asked(self, identities: Sequence[bytes], hits: Sequence[int], blocks: int) -> None:
        """A request for so many blocks starts on these cached ones, which still are as they were."""

    @abstractmethod
    def place(self, block: int, first: bool = False) -> None:
        """The block may be evicted from now on; `first`: its last child just was."""

    @abstractmethod
    def pop(self, oldest: int) -> int:
        """Choose among the placed blocks and unlink; NO_BLOCK if there are none. LRU would choose `oldest`."""

    def stored(self, block: int, identity: bytes, parent: int, depth: int, answer: bool, salt: str, fresh: int) -> None:
        """The index knows the block, which somebody holds. `parent`: the cached block before it, or NO_BLOCK."""
        self._stored += 1
        self._serial[block] = self._stored
        self.kids[block] = 0
        self._parent[block] = parent
        if parent >= 0:
            self._parent_serial[block] = self._serial[parent]
            self.kids[parent] += 1
            if self.is_free[parent] and self.kids[parent] == 1:
                self._unlink(parent)
        self.describe(block, identity, depth, answer, salt, fresh)

    def freed(self, block: int) -> None:
        self.is_free[block] = True
        if not self.kids[block]:
            self.place(block)

    def held(self, block: int) -> None:
        self.is_free[block] = False
        if not self.kids[block]:
            self._unlink(block)

    def victim(self, oldest: int) -> int:
        """The block to evict; it is out of the policy's books afterwards."""
        block = self.pop(oldest)
        if block < 0:  # all that is free has children that somebody uses: no order saves them
            block = oldest
        self.stats.evictions += 1
        self.is_free[block] = False
        self._serial[block] = 0
        parent = self._parent[block]  # as `_forget`: this is the one path that has to be quick
        if parent >= 0 and self._serial[parent] == self._parent_serial[block]:
            self.kids[parent] -= 1
            if not self.kids[parent] and self.is_free[parent]:
                self.place(parent, True)
        return block

    def gone(self, block: int) -> None:
        """Its content was forgotten, whether somebody holds it or not."""
        if not self._serial[block]:
            return
        if self.is_free[block]:
            self.is_free[block] = False
            if not self.kids[block]:
                self._unlink(block)
        self._forget(block)

    def _forget(self, block: int) -> None:
        self._serial[block] = 0
        parent = self._parent[block]
        if parent >= 0 and self._serial[parent] == self._parent_serial[block]:
            self.kids[parent] -= 1
            if not self.kids[parent] and self.is_free[parent]:
                self.place(parent, True)

    def new_head(self) -> int:
        """An empty ring's head."""
        if self._spare_heads:
            head = self._spare_heads.pop()
        else:
            head = len(self._next)
            self._next.append(head)
            self._prev.append(head)
        self._next[head] = self._prev[head] = head
        return head

    def _link(self, block: int, head: int, first: bool) -> None:
        after = self._next[head] if first else head
        before = self._prev[after]
        self._next[before], self._prev[block] = block, before
        self._next[block], self._prev[after] = after, block

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before

    def check_integrity(self, has_content: Sequence[bool], references: Sequence[int]) -> None:
        """Prove that the books agree with the pool's, and that exactly free blocks without children can be chosen."""
        kids = [0] * self._num_blocks
        for block, has in enumerate(has_content):
            if bool(self._serial[block]) != has or self.is_free[block] != (has and not references[block]):
                raise AssertionError(f"the eviction policy does not know how block {block} is")
            parent = self._parent[block]
            if has and parent >= 0 and self._serial[parent] == self._parent_serial[block]:
                kids[parent] += 1
        placed, heads = set[int](), range(self._num_blocks, len(self._next))
        for head in set(heads).difference(self._spare_heads):
            block = self._next[head]
            while block != head:
                if block in placed or self._prev[self._next[block]] != block:
                    raise AssertionError(f"block {block} is twice in the rings of the eviction policy")
                placed.add(block)
                block = self._next[block]
        wanted = {block for block, free in enumerate(self.is_free) if free and not kids[block]}
        if placed != wanted or any(has and self.kids[b] != kids[b] for b, has in enumerate(has_content)):
            raise AssertionError(
                f"blocks {sorted(placed ^ wanted)[:8]} are wrongly placed, or children were miscounted"
            )
