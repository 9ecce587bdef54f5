"""Routers in simulated time: the routers of `tokenmill route`, which count a replica's work in tokens here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tokenmill.errors import ConfigError
from tokenmill.kv.prefix import IdentityChains
from tokenmill.plan.simulator.replica import Replica, SimulatedJob
from tokenmill.routing.cache_view import CacheEvent
from tokenmill.routing.routers import Ask, CacheAware, LeastLoaded, RandomChoice, RoundRobin, Router

CHUNK = 512  # tokens per identity where nobody tells what is cached: coarser than blocks, so that the map stays small

# Names, and what makes the router of a seed and of blocks of so many tokens.
ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "random": lambda seed, block: RandomChoice(seed),
    "round-robin": lambda seed, block: RoundRobin(seed),
    "least-loaded": lambda seed, block: LeastLoaded(seed),
    # Remembers where prompts were sent.
    "prefix-aware": lambda seed, block: CacheAware(seed, block_size=CHUNK, sticky=False),
    # Is told what replicas have, as by their events.
    "cache-aware": lambda seed, block: CacheAware(seed, block_size=block, sticky=False),
}


class SimulatedRouter:
    """A router before simulated replicas. A replica that is told to tell does so at once: events take no time here."""

    def __init__(self, name: str, seed: int = 0, block_size: int = 16) -> None:
        if name not in ROUTERS:
            raise ConfigError(f"there is no router {name!r}; it may be one of {', '.join(ROUTERS)}")
        self._router = ROUTERS[name](seed, block_size)
        self._aware = self._router if isinstance(self._router, CacheAware) else None
        self._chains = IdentityChains(self._aware.block_size if self._aware else block_size)
        self.wants_events = name == "cache-aware"
        self._sequences: dict[int, int] = {}

    def watch(self, replica: Replica) -> None:
        """A replica is there, or there again."""
        if self._aware is not None and self.wants_events:
            self._sequences[replica.number] = 0
            view = self._aware.view(replica.number)
            view.epoch, view.is_current = 1, True
            replica.on_cache_change(partial(self._told, replica.number, view.take))

    def _told(
        self, number: int, take: Callable[[CacheEvent], bool], stored: Sequence[bytes], evicted: Sequence[bytes]
    ) -> None:
        self._sequences[number] += 1
        take(CacheEvent(1, self._sequences[number], tuple(stored), tuple(evicted)))

    def choose(self, job: SimulatedJob, replicas: Sequence[Replica]) -> Replica:
        """One of the replicas that take work (never none)."""
        chain: list[bytes] = []
        if self._aware is not None:
            self._chains.extend(chain, "", job.tokens, (len(job.tokens) - 1) // self._aware.block_size)
        choice = self._router.choose(Ask(len(job.tokens), chain), replicas)
        job.found = choice.found
        return next(one for one in replicas if one.number == choice.number)

    def forget(self, replica: Replica) -> None:
        """What this replica had in its memory is gone."""
        self._router.forget(replica.number)
