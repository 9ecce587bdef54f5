"""LFU and cost-aware eviction: how often a block was found, perhaps times what it costs to compute, with aging."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.kv.eviction.policy import NO_BLOCK, EvictionPolicy

LEVELS = 8  # keys per unit of cost
HORIZON = 32_768  # tokens before a token whose attention costs as much as the rest of it (28,600 in Llama 3 8B)
MOST = 255  # hits that count
ABOUT = {
    False: "cached blocks that were found least go first, with age",
    True: "cached blocks that were found least, times what they cost to compute, go first, with age",
}


class AgedPolicy(EvictionPolicy):
    """GreedyDual: a block's key is what it is worth plus the key of the last victim, so old worth fades.

    Worth is the times it was found and once more for being computed; with `costs` times the work to compute it, which
    grows with the tokens before it. All blocks are equally large. Blocks of one key lie in one ring, first in, first
    out; keys are whole numbers, and the lowest one only moves down when a block is placed below it.
    """

    def __init__(self, num_blocks: int, block_size: int, costs: bool) -> None:
        super().__init__("cost" if costs else "lfu", ABOUT[costs], num_blocks)
        self._costs = costs
        self._block_size = block_size
        self._found = [0] * num_blocks
        self._unit = [LEVELS if costs else 1] * num_blocks
        self._key = [0] * num_blocks
        self._age = 0  # key of the last victim
        self._lowest = 0
        self._heads: dict[int, int] = {}
        self._most = 0  # highest key there is

    def describe(self, block: int, identity: bytes, depth: int, answer: bool, salt: str, fresh: int) -> None:
        self._found[block] = 1
        if self._costs:
            self._unit[block] = LEVELS + LEVELS * depth * self._block_size // HORIZON
        self._key[block] = self._age + self._unit[block]

    def asked(self, identities: Sequence[bytes], hits: Sequence[int], blocks: int) -> None:
        found, unit, key, age = self._found, self._unit, self._key, self._age
        for block in hits:
            self.stats.hits += self.is_free[block]
            found[block] = min(found[block] + 1, MOST)
            key[block] = age + found[block] * unit[block]  # where it will lie when it is free again

    def place(self, block: int, first: bool = False) -> None:
        key = self._key[block]
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self.new_head()
            self._most = max(self._most, key)
        self._link(block, head, first)
        if key < self._lowest:
            self._lowest = key

    def pop(self, oldest: int) -> int:
        key, heads = self._lowest, self._heads
        while key <= self._most:
            head = heads.get(key)
            if head is not None:
                block = self._next[head]
                if block != head:
                    self._unlink(block)
                    self._lowest = key
                    self._age = max(self._age, key)
                    return block
                del heads[key]
                self._spare_heads.append(head)
            key += 1
        self._lowest = key
        return NO_BLOCK
