"""Learned eviction: hit density by class and age, under the eyes of a shadow LRU."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from zlib import crc32

from tokenmill.kv.eviction.density import BIN, BINS, CLASSES, EPOCHS, HitDensity
from tokenmill.kv.eviction.policy import NO_BLOCK, EvictionPolicy
from tokenmill.kv.eviction.shadow import ShadowLru

EPOCHS_PER_POOL = 16
SHORTEST_EPOCH = 64  # blocks stored
FEWEST_BETWEEN = 4096  # blocks stored between two rebuildings of the table
GHOST_TOKENS = 512  # of evicted content, one block in so many tokens is remembered
GHOSTS_PER_POOL = 32  # times what the pool holds
FEWEST_GHOSTS = 65_536
FRESH = (1536, 4608, 12_800, 30_720)  # tokens that a request has to compute
GAPS = (0.5, 1.0, 2.0, 4.0)  # pools filled since the turn before
MOST = 255  # hits that count
ABOUT = "cached blocks that bring the fewest hits for their time go first; LRU takes over where it finds more"

Ghost = tuple[int, int, int, int, int]  # class, since, hits, born, turn of an evicted block


class LearnedPolicy(EvictionPolicy):
    """Blocks of one class that became free in one epoch lie in one ring; a heap orders the rings by what they bring.

    An epoch is a number of stored blocks. Ages are counted in epochs, so a ring's worth changes only between them.
    A class is what is known of a block when it becomes free: how often it was found and in which time, which turn of a
    conversation used it last, how much that turn had to compute and how long it let itself be waited for, prompt or
    answer, and one of four groups of tenants. Blocks are equally large. What they cost to compute again is left out: to
    weigh by it found fewer tokens on a public trace, and saved no more work.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__("learned", ABOUT, num_blocks)
        self.density = HitDensity()
        self.shadow = ShadowLru(num_blocks, self.stats)
        self._block_size = block_size
        self._epoch_blocks = max(num_blocks // EPOCHS_PER_POOL, SHORTEST_EPOCH)
        self._per_pool = max(1.0, num_blocks / self._epoch_blocks)  # epochs in which the pool is filled once
        self._next_tick = self._epoch_blocks
        self._rebuild_every = max(round(self._per_pool / 2), -(-FEWEST_BETWEEN // self._epoch_blocks))  # epochs
        self._epochs_until_rebuild = self._rebuild_every
        self._identity = [b""] * num_blocks
        self._hits = [0] * num_blocks
        self._born = [0] * num_blocks  # epoch of its first use, evictions notwithstanding
        self._kind = [0] * num_blocks  # answer or prompt, and whose
        self._depth = [0] * num_blocks
        self._turn = [1] * num_blocks  # of the request that used it last
        self._context = [0] * num_blocks  # what that request was like, beside its turn
        self._known = [0] * num_blocks  # blocks of that request that had been there before
        self._class = [0] * num_blocks
        self._since = [0] * num_blocks  # epoch in which it became free last
        self._classes: dict[int, int] = {}
        self._rings: dict[int, int] = {}  # heads by epoch and class
        self._heap: list[tuple[float, int, int]] = []  # worth, key and head of each ring
        # Two generations of ghosts: the older one goes as a whole.
        self._stride = max(1, GHOST_TOKENS // block_size)
        self._ghosts: dict[bytes, Ghost] = {}
        self._old_ghosts: dict[bytes, Ghost] = {}
        self._ghosts_began = self._old_ghosts_began = 0  # epochs
        self._most_ghosts = max(GHOSTS_PER_POOL * num_blocks // self._stride, FEWEST_GHOSTS) // 2

    def asked(self, identities: Sequence[bytes], hits: Sequence[int], blocks: int) -> None:
        density, shadow, is_free, since_of = self.density, self.shadow, self.is_free, self._since
        now, stride = density.epoch, self._stride
        found, by_lru = 0, 0.0
        for block in hits:
            if is_free[block]:
                since = since_of[block]
                found += 1
                by_lru += shadow.has(since)
                density.found(self._class[block], since)
        turn, gap, known = 1, 0, len(hits)
        if hits and not self.kids[hits[-1]]:  # goes on where another ended; else it only begins alike
            turn, gap = self._turn[hits[-1]] + 1, now - since_of[hits[-1]]
        for number in range(-(-known // stride) * stride, len(identities), stride):
            ghost = self._ghosts.get(identities[number]) or self._old_ghosts.get(identities[number])
            if ghost is None:
                break
            weight = min(number + 1 - known, stride)
            known = number + 1
            by_lru += weight * shadow.has(ghost[1])
            density.found(ghost[0], ghost[1], weight)
            turn, gap = ghost[4] + 1, now - ghost[1]
        shadow.count(found, by_lru)
        context = self._context_of(turn, gap, blocks - known)
        for block in hits:
            if self._hits[block] < MOST:
                self._hits[block] += 1
            self._turn[block] = turn
            self._context[block] = context
            self._known[block] = known

    def _context_of(self, turn: int, gap: int, fresh: int) -> int:
        tokens = fresh * self._block_size
        size = sum([tokens >= most for most in FRESH])
        if turn == 1:
            return size
        return 5 + 5 * size + sum([gap >= pools * self._per_pool for pools in GAPS])

    def describe(self, block: int, identity: bytes, depth: int, answer: bool, salt: str, fresh: int) -> None:
        parent, known = self._parent[block], 0
        if parent >= 0:  # of the same request
            self._turn[block], self._context[block] = self._turn[parent], self._context[parent]
            self._known[block] = known = self._known[parent]
        else:
            self._turn[block], self._context[block] = 1, self._context_of(1, 0, fresh)
            self._known[block] = 0
        self._identity[block] = identity
        self._depth[block] = depth
        self._kind[block] = 2 * (crc32(salt.encode()) % 4) + answer if salt else int(answer)
        ghost = None
        if not depth % self._stride:
            ghost = self._ghosts.pop(identity, None) or self._old_ghosts.pop(identity, None)
        if ghost is not None:
            kind, since, hits, born, _ = ghost
            self.density.leave(kind, since, self._stride)
            self._hits[block], self._born[block] = min(hits + 1, MOST), born
        elif depth < known and depth % self._stride:  # between two that were remembered
            self._hits[block], self._born[block] = self._hits[parent], self._born[parent]
        else:
            self._hits[block], self._born[block] = 0, self.density.epoch
        if self._stored >= self._next_tick:
            self._tick()

    def freed(self, block: int) -> None:
        hits = self._hits[block]
        if hits > 1:
            old = int(2 * (self.density.epoch - self._born[block]) / self._per_pool)
            key = ((min(hits.bit_length(), 5) * 8 + min(old.bit_length(), 6)) * 8 + self._kind[block]) * 4
            key += min(self._turn[block], 3)
        else:
            key = -1 - (2 * (8 * self._context[block] + self._kind[block]) + hits)
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = min(len(self._classes), CLASSES - 1)
        self._class[block] = known
        self._since[block] = self.density.epoch
        self.density.enter(known)
        self.is_free[block] = True
        if not self.kids[block]:
            self.place(block)

    def held(self, block: int) -> None:
        self.density.leave(self._class[block], self._since[block])
        super().held(block)

    def place(self, block: int, first: bool = False) -> None:
        key = self._since[block] * CLASSES + self._class[block]
        head = self._rings.get(key)
        if head is None:
            head = self._rings[key] = self.new_head()
            heappush(self._heap, (self._worth(key), key, head))
        self._link(block, head, first)

    def _worth(self, key: int) -> float:
        since, known = divmod(key, CLASSES)
        age = self.density.epoch - since
        return self.density.table[known][BIN[age] if age < EPOCHS else BINS - 1]

    def pop(self, oldest: int) -> int:
        if self.shadow.leads and not self.kids[oldest]:
            self._unlink(oldest)
            if not self._depth[oldest] % self._stride:
                self._remember(oldest)
            return oldest
        heap, following = self._heap, self._next
        while heap:
            head = heap[0][2]
            block = following[head]
            if block != head:
                after = following[head] = following[block]
                self._prev[after] = head
                if not self._depth[block] % self._stride:
                    self._remember(block)
                return block
            _, key, _ = heappop(heap)
            del self._rings[key]
            self._spare_heads.append(head)
        return NO_BLOCK

    def _remember(self, block: int) -> None:
        ghosts = self._ghosts
        known, since, hits = self._class[block], self._since[block], self._hits[block]
        ghosts[self._identity[block]] = known, since, hits, self._born[block], self._turn[block]
        if len(ghosts) >= self._most_ghosts:
            self._old_ghosts, self._ghosts = ghosts, {}
            self._old_ghosts_began, self._ghosts_began = self._ghosts_began, self.density.epoch

    def gone(self, block: int) -> None:
        if self.is_free[block]:
            self.density.leave(self._class[block], self._since[block])
        super().gone(block)

    def _tick(self) -> None:
        """An epoch is over: order the rings by what they bring now."""
        self._next_tick += self._epoch_blocks
        density = self.density
        density.tick()
        self._epochs_until_rebuild -= 1
        if not self._epochs_until_rebuild:
            density.rebuild(self._old_ghosts_began, max(1, len(self._classes)))
            self._epochs_until_rebuild = self._rebuild_every
        self.shadow.tick(density)
        rings, following = {}, self._next
        heap = []
        for key, head in self._rings.items():
            if following[head] == head:
                self._spare_heads.append(head)
            else:
                rings[key] = head
                heap.append((self._worth(key), key, head))
        heapify(heap)
        self._rings, self._heap = rings, heap
