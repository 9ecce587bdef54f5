"""Routers: at random, in turn, least loaded, or cache-aware. They only choose; somebody else sends and counts."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.routing.block_index import BlockIndex, leading
from tokenmill.routing.cache_view import CacheView

MOST_KNOWN = 4_000_000  # identities per replica: 64 million tokens in blocks of 16
MOST_ASSUMED = 1_000_000
TYPICAL_OUTPUT = 256  # tokens that are booked for an answer whose length nobody knows


class Candidate(Protocol):
    """A replica as a router sees it, at one moment."""

    @property
    def number(self) -> int:
        """0, 1, 2, ...: never given to another one as long as anybody remembers the first."""
        ...

    @property
    def open(self) -> bool:
        """It is alive, and takes new work."""
        ...

    @property
    def load(self) -> float:
        """Seconds of work that it has accepted and not done."""
        ...

    @property
    def seconds_per_token(self) -> float:
        """Of a prompt."""
        ...


@dataclass(frozen=True)
class Ask:
    """What a router knows of a request."""

    tokens: int = 0  # of its prompt
    chain: Sequence[bytes] = ()  # identities of the prompt's full blocks; empty: nobody knows
    session: bytes = b""  # requests of one session have the same, if anybody said so


@dataclass(frozen=True)
class Choice:
    number: int
    found: int = 0  # leading tokens of the prompt that the router believes to be cached there


class NobodyOpen(TokenmillError):
    """No replica takes work."""


class Router(Protocol):
    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        """One of the candidates that are open. Raises NobodyOpen if there is none."""
        ...

    def forget(self, number: int) -> None:
        """What this replica had in its memory is gone."""
        return


def open_ones(candidates: Sequence[Candidate]) -> list[Candidate]:
    found = [one for one in candidates if one.open]
    if not found:
        raise NobodyOpen("no replica takes work now; try again later")
    return found


def _load(candidate: Candidate) -> float:
    return candidate.load


class RandomChoice(Router):
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        return Choice(self._random.choice(open_ones(candidates)).number)


class RoundRobin(Router):
    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        self._turn += 1
        found = open_ones(candidates)
        return Choice(found[self._turn % len(found)].number)


class LeastLoaded(Router):
    """The least work outstanding; the first of equals."""

    def __init__(self, seed: int = 0) -> None: ...

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        return Choice(min(open_ones(candidates), key=_load).number)


class CacheAware(Router):
    """Where the first token comes soonest: seconds of work ahead, plus those for what of the prompt is not cached.

    What is cached is what replicas tell (`view`), and what was sent to them just now (`assumed`): requests that come
    together find each other before the first of them is computed. With `link`, blocks that another replica has may also
    be fetched from there, where that is quicker than to compute them. A replica whose queue is longer than the shortest
    by more than `imbalance` seconds is not chosen, whatever it has.

    A request of which nobody knows anything goes where its session (or its first block) belongs by a hash that all
    routers agree on, unless the queue there is longer by more than its prompt takes and `slack` seconds.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        block_size: int = 16,
        imbalance: float = math.inf,
        sticky: bool = True,
        slack: float = 0.0,
        assume: bool = True,
        link_seconds_per_token: float = math.inf,
        most_known: int = MOST_KNOWN,
        most_assumed: int = MOST_ASSUMED,
    ) -> None:
        self.block_size = block_size
        self.known = BlockIndex(most_known)
        self.assumed = BlockIndex(most_assumed)
        self._seed = seed.to_bytes(8, "big", signed=True)
        self._imbalance = imbalance
        self._sticky = sticky
        self._slack = slack
        self._assume = assume
        self._link = link_seconds_per_token

    def view(self, number: int) -> CacheView:
        """Of a replica that tells what its cache holds."""
        return CacheView(number, self.known, lambda identities: self.assumed.remove(number, identities))

    def forget(self, number: int) -> None:
        self.known.clear(number)
        self.assumed.clear(number)

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        found = open_ones(candidates)
        if len(found) > 1:
            most = min(map(_load, found)) + self._imbalance
            found = [one for one in found if one.load <= most]
        depths = self._depths(ask, found)
        if not depths and self._sticky and (key := ask.session or bytes(ask.chain[0] if ask.chain else b"")):
            best = self._owner(key, ask, found)
        else:
            best = self._soonest(ask, found, depths)
        if self._assume and ask.chain:
            self.assumed.add(best.number, ask.chain)
        return Choice(best.number, depths.get(best.number, 0))

    def _depths(self, ask: Ask, found: list[Candidate]) -> dict[int, int]:
        """Cached tokens by replica, where there are any."""
        replicas = 0
        for one in found:
            replicas |= 1 << one.number
        depths: dict[int, int] = {}
        for mask, blocks in leading((self.known, self.assumed), ask.chain, replicas):
            while mask:
                lowest = mask & -mask
                depths[lowest.bit_length() - 1] = blocks * self.block_size
                mask ^= lowest
        return depths

    def _soonest(self, ask: Ask, found: list[Candidate], depths: dict[int, int]) -> Candidate:
        longest = max(depths.values(), default=0)
        best, least = found[0], (math.inf, 0)
        for one in found:
            cached = depths.get(one.number, 0)
            missing = (ask.tokens - cached) * one.seconds_per_token
            if self._link < one.seconds_per_token:  # what another one has is fetched
                missing -= (longest - cached) * (one.seconds_per_token - self._link)
            score = (one.load + missing, -cached)
            if score < least:
                best, least = one, score
        return best

    def _owner(self, key: bytes, ask: Ask, found: list[Candidate]) -> Candidate:
        """Rendezvous hashing: when a replica comes or goes, only its own sessions move."""
        shortest = min(map(_load, found))
        near = [one for one in found if one.load - shortest <= self._slack + ask.tokens * one.seconds_per_token]
        return max(near, key=lambda one: (_weight(self._seed, key, one.number), -one.number))


def _weight(seed: bytes, key: bytes, number: int) -> bytes:
    return hashlib.blake2b(key + number.to_bytes(4, "big"), digest_size=8, key=seed).digest()


POLICIES: dict[str, type[RoundRobin | LeastLoaded | CacheAware]] = {
    "cache": CacheAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def policy_named(name: str, seed: int = 0) -> RoundRobin | LeastLoaded | CacheAware:
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; it may be one of {', '.join(POLICIES)}")
    return POLICIES[name](seed)
