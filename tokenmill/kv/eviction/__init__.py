"""Eviction: which cached block that nobody uses is given up when memory is needed."""

from __future__ import annotations

from tokenmill.errors import ConfigError
from tokenmill.kv.eviction.aged import AgedPolicy
from tokenmill.kv.eviction.learned import LearnedPolicy
from tokenmill.kv.eviction.policy import EvictionPolicy

EVICTION = ("lru", "lfu", "cost", "learned")


def policy_for(name: str, num_blocks: int, block_size: int) -> EvictionPolicy | None:
    """None for lru: the pool's free list is in that order anyway."""
    if name == "lru":
        return None
    if name == "lfu":
        return AgedPolicy(num_blocks, block_size, costs=False)
    if name == "cost":
        return AgedPolicy(num_blocks, block_size, costs=True)
    if name == "learned":
        return LearnedPolicy(num_blocks, block_size)
    raise ConfigError(f"there is no eviction {name!r}; it may be one of {', '.join(EVICTION)}")
