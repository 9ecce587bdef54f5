"""BlockPool: fixed-size blocks with reference counts, an intrusive free list, and frees fenced by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class BlockPool:
    """Ownership rules.

    - `take` gives a block with one reference; `share` adds one; `release` gives one back.
    - A block with no reference is free. If it has content that the prefix index knows, it keeps it until it is
      taken again: the free list is in eviction order, blocks without content first, then least recently used.
    - `release(..., fence)` keeps the reference until step `fence` is settled, because a launched step may read it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least one block")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.has_content = [False] * num_blocks  # known to the prefix index
        self.num_free = num_blocks
        self.num_fenced = 0  # references waiting for their fence
        self.settled = 0  # newest step known to be done
        self._on_evict = on_evict or (lambda block: None)
        self._fenced: deque[tuple[int, list[int]]] = deque()
        # A doubly linked ring through two arrays; the sentinel is index num_blocks.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    def take(self) -> int:
        """A free block with one reference; its old content is forgotten. The caller checked `num_free`."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise RuntimeError("the block pool is empty; callers check num_free first")
        self._unlink(block)
        if self.has_content[block]:
            self.has_content[block] = False
            self._on_evict(block)
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

    def mark_content(self, block: int, has: bool) -> None:
        """Tell the pool that the prefix index learned or forgot this block."""
        self.has_content[block] = has
        if not has and self.references[block] == 0:  # worthless now: first to be taken
            self._unlink(block)
            self._link(block)

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Prove that free + used == total and that every reference has exactly one holder."""
        counted = [0] * self.num_blocks
        for blocks in [*holders, *(held for _, held in self._fenced)]:
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

    def _link(self, block: int) -> None:
        """Into the free list: blocks without content first, others last."""
        after = self.num_blocks if self.has_content[block] else self._next[self.num_blocks]
        before = self._prev[after]
        self._next[before], self._prev[block] = block, before
        self._next[block], self._prev[after] = after, block
        self.num_free += 1
