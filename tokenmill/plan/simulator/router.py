"""Routers: which replica gets a request. They know what a front process knows: prompts, and who was sent where."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from tokenmill.errors import ConfigError
from tokenmill.kv.prefix import IdentityChains
from tokenmill.plan.simulator.replica import Replica, SimulatedJob

CHUNK = 512  # tokens per identity in the router's map: coarser than blocks, so that the map stays small
REMEMBERED = 1_000_000  # identities
_load = attrgetter("load")


class Router(Protocol):
    def choose(self, job: SimulatedJob, replicas: Sequence[Replica]) -> Replica:
        """One of the replicas that take work (never none). `replica.load` is the tokens of all that is on it."""
        ...

    def forget(self, replica: Replica) -> None:
        """What this replica had in its memory is gone."""
        return


class RandomChoice(Router):
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, job: SimulatedJob, replicas: Sequence[Replica]) -> Replica:
        return self._random.choice(replicas)


class RoundRobin(Router):
    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, job: SimulatedJob, replicas: Sequence[Replica]) -> Replica:
        self._turn += 1
        return replicas[self._turn % len(replicas)]


class LeastLoaded(Router):
    """The fewest tokens outstanding; the first of equals."""

    def __init__(self, seed: int = 0) -> None: ...

    def choose(self, job: SimulatedJob, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=_load)


class PrefixAware(Router):
    """Where the longest beginning of the prompt was sent before, unless that queue is longer by more than it saves.

    Beginnings are named by the engine's own hash chain. The map holds where requests were sent, not what replicas
    still have: a replica may have evicted it, and then the request is computed like any other.
    """

    def __init__(self, seed: int = 0) -> None:
        self._chains = IdentityChains(CHUNK)
        self._sent: OrderedDict[bytes, dict[int, None]] = OrderedDict()  # identity -> replicas, the latest last

    def choose(self, job: SimulatedJob, replicas: Sequence[Replica]) -> Replica:
        chain: list[bytes] = []
        self._chains.extend(chain, "", job.tokens, (len(job.tokens) - 1) // CHUNK)
        best, job.found = min(replicas, key=_load), 0
        holders, depth = self._holders(chain)
        if holders:
            near = min((one for one in replicas if one.number in holders), key=_load, default=None)
            if near is not None and near.load - depth * CHUNK <= best.load:
                best, job.found = near, depth * CHUNK
        for identity in chain:
            self._sent.setdefault(identity, {})[best.number] = None
            self._sent.move_to_end(identity)
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        return best

    def forget(self, replica: Replica) -> None:
        for numbers in self._sent.values():
            numbers.pop(replica.number, None)

    def _holders(self, chain: list[bytes]) -> tuple[dict[int, None], int]:
        """Who was sent the longest known beginning, and how many chunks it has."""
        for depth in range(len(chain), 0, -1):
            found = self._sent.get(chain[depth - 1])
            if found:
                return found, depth
        return {}, 0


ROUTERS: dict[str, type[RandomChoice | RoundRobin | LeastLoaded | PrefixAware]] = {
    "random": RandomChoice,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}


def router_named(name: str, seed: int = 0) -> Router:
    if name not in ROUTERS:
        raise ConfigError(f"there is no router {name!r}; it may be one of {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)
