"""BlockPool: fixed-size blocks with reference counts, an intrusive free list, and frees fenced by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from tokenmill.kv.eviction.policy import EvictionPolicy


class BlockPool:
    """Ownership rules.

    - `take` gives a block with one reference; `share` adds one; `release` gives one back.
    - A block with no reference is free. If it has content that the prefix index knows, it keeps it until it is
      taken again: the free list is in eviction order, blocks without content first, then least recently used.
      An eviction policy, where there is one, chooses among the latter in another order.
    - `release(..., fence)` keeps the reference until step `fence` is settled, because a launched step may read it.
    - `hold` hands references over to a transfer, which copies from or to the blocks; `let_go` gives them back.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None] | None = None,
        eviction: EvictionPolicy | None = None,  # None: least recently used
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least one block")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.has_content = [False] * num_blocks  # known to the prefix index
        self.num_free = num_blocks
        self.num_fenced = 0  # references waiting for their fence
        self.settled = 0  # newest step known to be done
        self._on_evict = on_evict or (lambda block: None)
        self._eviction = eviction
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self.held: dict[int, list[int]] = {}  # number of a transfer -> references that are its own
        self.hanging: set[int] = set()  # of these: nobody knows when they end
        # A doubly linked ring through two arrays; the sentinel is index num_blocks.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    def take(self) -> int:
        """A free block with one reference; its old content is forgotten. The caller checked `num_free`."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise RuntimeError("the block pool is empty; callers check num_free first")
        if self.has_content[block]:
            if self._eviction is not None:
                block = self._eviction.victim(block)
            self.has_content[block] = False
            self._on_evict(block)
        self._unlink(block)
        self.references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        references = self.references
        for block in blocks:
            if references[block] == 0:
                if not self.has_content[block]:
                    raise RuntimeError(f"block {block} is free and empty; only content can be shared")
                self._unlink(block)
            references[block] += 1

    def release(self, blocks: Iterable[int], fence: int = 0) -> None:
        """Give back one reference of each block, once step `fence` is settled."""
        held = list(blocks)
        if not held:
            return
        if fence > self.settled:
            self._fenced.append((fence, held))
            self.num_fenced += len(held)
        else:
            self._drop(held)

    def settle(self, step: int) -> None:
        """Step `step` and all before it are done (or void): their fences open."""
        self.settled = max(self.settled, step)
        waiting = deque[tuple[int, list[int]]]()
        for fence, held in self._fenced:
            if fence > self.settled:
                waiting.append((fence, held))
            else:
                self.num_fenced -= len(held)
                self._drop(held)
        self._fenced = waiting

    def hold(self, transfer: int, blocks: list[int]) -> None:
        """From now on one reference of each block is the transfer's."""
        self.held[transfer] = blocks

    def let_go(self, transfer: int) -> None:
        """The transfer touches its blocks no more."""
        self.hanging.discard(transfer)
        self._drop(self.held.pop(transfer))

    @property
    def num_held(self) -> int:
        """Blocks that nobody but transfers holds: they come free by themselves, soon, where none of these hangs."""
        if not self.held:
            return 0
        counts: dict[int, int] = {}
        for number, blocks in self.held.items():
            for block in blocks if number not in self.hanging else ():
                counts[block] = counts.get(block, 0) + 1
        return sum(1 for block, count in counts.items() if self.references[block] == count)

    def mark_content(self, block: int, has: bool) -> None:
        """Tell the pool that the prefix index learned or forgot this block."""
        self.has_content[block] = has
        if not has and self._eviction is not None:
            self._eviction.gone(block)
        if not has and self.references[block] == 0:  # worthless now: first to be taken
            self._unlink(block)
            self._link(block)

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Prove that free + used == total and that every reference has exactly one holder."""
        counted = [0] * self.num_blocks
        for blocks in [*holders, *(held for _, held in self._fenced), *self.held.values()]:
            for block in blocks:
                counted[block] += 1
        if counted != self.references:
            pairs = zip(self.references, counted, strict=True)
            wrong = [(block, had, held) for block, (had, held) in enumerate(pairs) if had != held]
            raise AssertionError(f"blocks with (id, references, holders) that disagree: {wrong[:8]}")
        seen, block = 0, self._next[self.num_blocks]
        while block != self.num_blocks:
            if self.references[block] or self._prev[self._next[block]] != block:
                raise AssertionError(f"block {block} is in the free list with {self.references[block]} references")
            seen, block = seen + 1, self._next[block]
            if seen > self.num_blocks:
                raise AssertionError("the free list has a cycle")
        used = sum(1 for count in self.references if count)
        if self._eviction is not None:
            self._eviction.check_integrity(self.has_content, self.references)
        if seen != self.num_free or seen + used != self.num_blocks:
            raise AssertionError(f"{seen} blocks in the free list, {self.num_free} counted free, {used} used")

    def _drop(self, blocks: list[int]) -> None:
        # Last block first, so that the end of a sequence is evicted before the beginning that others may share.
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self._link(block)
            elif self.references[block] < 0:
                raise AssertionError(f"block {block} was released more often than it was taken")

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
        if self._eviction is not None and self.has_content[block]:
            self._eviction.held(block)

    def _link(self, block: int) -> None:
        """Into the free list: blocks without content first, others last."""
        after = self.num_blocks if self.has_content[block] else self._next[self.num_blocks]
        before = self._prev[after]
        self._next[before], self._prev[block] = block, before
        self._next[block], self._prev[after] = after, block
        self.num_free += 1
        if self._eviction is not None and self.has_content[block]:
            self._eviction.freed(block)
