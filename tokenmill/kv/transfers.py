"""Transfers: which blocks are on their way between the device and other places, for whom, and whether that pays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tokenmill.kv.transport import Done, Transport
from tokenmill.step_time import Facts, FittedStepTime, StepTimeModel

if TYPE_CHECKING:
    from tokenmill.engine.step import Step
    from tokenmill.kv.manager import Holder, KVManager

log = logging.getLogger("tokenmill.kv")

TRIES = 3  # times that blocks do not arrive before a request is let in without
PATIENCE, TIMES_LATE = 1.0, 10.0  # seconds, and how often what was expected, before a request goes on without
LARGEST_SHARE = 0.25  # of the device's blocks that are kept from being used by what is written elsewhere
POSTPONED = 4096  # blocks whose writing was put off that are remembered
AT_ONCE = 256  # blocks of one ticket: a short piece is there before a long one would be
HOPE = 1.02  # by how much a place is thought to be faster each time that it was not asked: it is tried again some day
REMEMBERED = 0.8  # of what was known of a bandwidth, after another piece


class Bell(Protocol):
    """Rung when a transfer has ended."""

    def wait(self, seconds: float) -> None:
        """Until it rings, at most so long."""
        ...


@dataclass
class TierStats:
    """Of one place, in blocks."""

    read: int = 0
    written: int = 0
    unwritten: int = 0  # that were to be written, and were not kept
    failed: int = 0  # that were to be read, and did not arrive
    refused: int = 0  # neither read nor written, because too much was waiting
    spared: int = 0  # not read, because to compute them again was expected to be faster
    late: int = 0  # requests that went on without


@dataclass
class Tier:
    """A place and what is brought to it: every full block, or those that were of use a second time."""

    transport: Transport
    on_second_use: bool = False
    bandwidth: float = 0.0  # bytes per second of reads, measured; 0: not known yet
    waiting: int = 0  # blocks that are under way, in and out
    hanging: int = 0  # tickets that take far longer than they should: as long as there is one, nothing else is asked
    failures: int = 0
    stats: TierStats = field(default_factory=TierStats)
    _writing: set[bytes] = field(default_factory=set)
    _postponed: dict[bytes, None] = field(default_factory=dict)  # to be written when there is room, if still there

    def learn(self, size: int, seconds: float) -> None:
        if size and seconds > 0:
            rate = size / seconds
            self.bandwidth = rate if not self.bandwidth else 1 / (REMEMBERED / self.bandwidth + (1 - REMEMBERED) / rate)

    def told(self, done: Done, what: str, count: int) -> None:
        """One line for the first failure, the tenth, the hundredth."""
        self.failures += 1
        if str(self.failures).rstrip("0") == "1":
            log.warning(
                "kv %s: %d of %d blocks %s (failure number %d; nothing is lost, what is missing is computed again): %s",
                self.transport.name, done.arrived, count, what, self.failures, done.failure,
            )  # fmt: skip


@dataclass(slots=True)
class Fetch:
    """What a request waits for."""

    request: Holder
    rank: tuple[int, float, int]  # smaller ones are let in first
    expected: int  # blocks that it will need on top of those that are on their way
    under_way: int = 0  # tickets


@dataclass(slots=True)
class _Copy:
    """A ticket of a tier."""

    tier: Tier
    identities: list[bytes]
    salt: str
    blocks: list[int] | None = None  # those read into, in the order of identities; None: blocks are written
    waiting: list[Fetch] = field(default_factory=list)  # who waits for it
    until: float = 0.0  # when its place is thought to hang, and whoever waits goes on without
    is_late: bool = False
    void: bool = False  # what arrives is not to be found: it was forgotten meanwhile


class Transfers:
    """What moves, for whom.

    Blocks of a transfer are held for it in the pool, under a number, until its ticket has ended; so it does not matter
    to memory whether the request that wanted them still lives. What arrived becomes free with content, like any block
    that a finished request leaves behind, and the request finds it in the prefix index when it is let in.
    """

    def __init__(
        self,
        kv: KVManager,
        tiers: Sequence[Tier],
        block_bytes: int,
        bell: Bell,
        clock: Callable[[], float],
        step_time: StepTimeModel | None = None,  # None: learned from the steps
    ) -> None:
        self.kv, self.tiers, self.block_bytes, self._bell, self.clock = kv, list(tiers), block_bytes, bell, clock
        self._fitted = FittedStepTime() if step_time is None else None
        self._step_time: StepTimeModel | None = step_time
        self.fetches: dict[int, Fetch] = {}  # by id() of the request
        self._copies: dict[tuple[str, int], tuple[int, _Copy]] = {}  # (tier, ticket) -> its number in the pool
        self._coming: dict[bytes, _Copy] = {}  # what reads will bring
        self._number = 0
        self.swapped = self.recomputed = 0  # preempted requests that came back from a tier, and that were read again

    @property
    def under_way(self) -> bool:
        return bool(self._copies)

    def writing(self, identities: Sequence[bytes]) -> bool:
        """Whether any of these blocks is on its way to a place, or waits for that."""
        tiers = [tier for tier in self.tiers if not tier.hanging]
        return any(one in tier._writing or one in tier._postponed for tier in tiers for one in identities)

    def expected_before(self, rank: tuple[int, float, int]) -> int:
        """Blocks that those who wait will need once theirs are there: whoever comes after them leaves these free."""
        return sum(one.expected for one in self.fetches.values() if one.rank <= rank)

    def learn(self, step: Step, seconds: float) -> None:
        if self._fitted is not None:
            from tokenmill.step_time import facts_of

            self._fitted.learn(facts_of(step), seconds)
            self._step_time = self._fitted if self._fitted.known else None

    # Out

    def proven(self, blocks: Iterable[int]) -> None:
        """Steps that filled these are done."""
        self._write(blocks, second_use=False)
        for tier in self.tiers:
            if tier._postponed and not tier.hanging:
                self._write_postponed(tier)

    def used_again(self, blocks: Iterable[int]) -> None:
        """A request starts on these; the steps that fill some of them may not be done."""
        wanting = [tier for tier in self.tiers if tier.on_second_use]
        if not wanting:
            return
        unproven = self.kv.unproven
        self._write([block for block in blocks if block not in unproven], second_use=True)
        names = [self.kv.index.name_of(block) for block in blocks if block in unproven]
        for tier in wanting:
            tier._postponed.update((name[0], None) for name in names if name is not None)

    def save(self, request: Holder) -> None:
        """It is preempted: what it has computed is kept somewhere if that may be cheaper than to compute it again."""
        unproven = self.kv.unproven
        blocks = [block for block in request.blocks[: request.num_published] if block not in unproven]
        if blocks and self._pays(len(blocks), 0, len(request.tokens), self.tiers[0]):
            self._write(blocks, second_use=False)

    def _write(self, blocks: Iterable[int], second_use: bool) -> None:
        """Bring to the tiers what they do not have; on a second use also to those that take nothing else."""
        by_salt: dict[str, list[tuple[bytes, int]]] = {}
        for block in blocks:
            name = self.kv.index.name_of(block)
            if name is not None:
                by_salt.setdefault(name[1], []).append((name[0], block))
        for tier in self.tiers:
            if tier.on_second_use != second_use or tier.hanging:
                continue
            for salt, entries in by_salt.items():
                new = [one for one in entries if one[0] not in tier._writing and not tier.transport.lookup([one[0]])]
                for at in range(0, len(new), AT_ONCE):
                    self._write_piece(tier, salt, new[at : at + AT_ONCE])

    def _write_postponed(self, tier: Tier) -> None:
        unproven = self.kv.unproven
        room = min(AT_ONCE, int(LARGEST_SHARE * self.kv.pool.num_blocks) - sum(one.waiting for one in self.tiers))
        by_salt: dict[str, list[tuple[bytes, int]]] = {}
        while tier._postponed and room > 0:
            identity = next(iter(tier._postponed))
            del tier._postponed[identity]
            found = self.kv.index.find_leading([identity])
            name = self.kv.index.name_of(found[0]) if found and found[0] not in unproven else None
            if name is None:
                tier.stats.refused += 1
            elif identity not in tier._writing and not tier.transport.lookup([identity]):
                by_salt.setdefault(name[1], []).append((identity, found[0]))
                room -= 1
        for salt, entries in by_salt.items():
            self._write_piece(tier, salt, entries)

    def _write_piece(self, tier: Tier, salt: str, entries: list[tuple[bytes, int]]) -> None:
        """As many as may be under way; the others later, if they are still there."""
        room = int(LARGEST_SHARE * self.kv.pool.num_blocks) - sum(one.waiting for one in self.tiers)
        some = entries[: max(0, room)]
        identities, blocks = [one[0] for one in some], [one[1] for one in some]
        ticket = tier.transport.write(identities, blocks, salt) if some else None
        if ticket is not None:
            self.kv.pool.share(blocks)
            self._hold(ticket, _Copy(tier, identities, salt), blocks, 0.0)
            tier._writing.update(identities)
        later = entries[len(some) :] if ticket is not None else entries
        tier._postponed.update((one[0], None) for one in later)
        while len(tier._postponed) > POSTPONED:
            del tier._postponed[next(iter(tier._postponed))]
            tier.stats.refused += 1

    # In

    def fetch(
        self,
        request: Holder,
        hits: list[int],
        identities: list[bytes],
        need: int,
        rank: tuple[int, float, int],
    ) -> bool:
        """Start to read what follows the `hits` and is held somewhere, where that pays; whether anything is on its way.

        need: free blocks that the request takes if it is let in now; the caller has seen that there are so many.
        """
        coming = self._on_their_way(identities, len(hits))
        if coming:  # for others who begin alike: what follows those is read when they are there
            fetch = Fetch(request, rank, need, len(coming))
            for copy in coming:
                copy.waiting.append(fetch)
            self.fetches[id(request)] = fetch
            return True
        pieces = self._plan(request, len(hits), identities)
        if not pieces:
            return False
        total = sum(len(piece) for _, piece in pieces)
        seconds = sum(self._read_seconds(tier, len(piece)) for tier, piece in pieces)
        fetch = Fetch(request, rank, 0)
        self.kv.pool.share(hits)  # what the others follow has to stay, and must not be taken for them
        started = 0
        for tier, piece in pieces:
            blocks = [self.kv.pool.take() for _ in piece]
            ticket = tier.transport.read(piece, blocks)
            if ticket is None:
                tier.stats.refused += total - started
                self.kv.pool.release(blocks)
                break
            started += len(piece)
            held = blocks if fetch.under_way else [*hits, *blocks]
            fetch.under_way += 1
            copy = _Copy(tier, piece, request.salt, blocks, [fetch])
            self._coming.update(dict.fromkeys(piece, copy))
            self._hold(ticket, copy, held, seconds)
        if not started:
            self.kv.pool.release(hits)
            return False
        fetch.expected = max(0, need - started)
        self.fetches[id(request)] = fetch
        return True

    def _on_their_way(self, identities: list[bytes], first: int) -> list[_Copy]:
        """Reads that bring the blocks behind the first ones, as far as there is no gap."""
        found: dict[int, _Copy] = {}
        for identity in identities[first:]:
            copy = self._coming.get(identity)
            if copy is None or copy.void or copy.is_late:
                break
            found[id(copy)] = copy
        return list(found.values())

    def _plan(self, request: Holder, first: int, identities: list[bytes]) -> list[tuple[Tier, list[bytes]]]:
        """Which tier reads what; the nearest that has it, as far as that is cheaper than to compute it."""
        pieces: list[tuple[Tier, list[bytes]]] = []
        at = first
        while at < len(identities):
            for tier in self.tiers:
                rest = identities[at:]
                held = 0 if tier.hanging else tier.transport.lookup(rest)
                if held:
                    pieces += [(tier, rest[low : min(low + AT_ONCE, held)]) for low in range(0, held, AT_ONCE)]
                    at += held
                    break
            else:
                break
        count = at - first
        while pieces:
            seconds = sum(self._read_seconds(tier, len(piece)) for tier, piece in pieces)
            if seconds < self._compute_seconds(count, first, len(request.tokens)):
                break
            tier, piece = pieces.pop()
            tier.stats.spared += len(piece)
            tier.bandwidth *= HOPE
            count -= len(piece)
        return pieces

    def _pays(self, count: int, first: int, tokens: int, tier: Tier) -> bool:
        return self._read_seconds(tier, count) < self._compute_seconds(count, first, tokens)

    def _read_seconds(self, tier: Tier, count: int) -> float:
        """How long blocks take behind those that are under way; nothing, as long as nobody has tried."""
        return (count + tier.waiting) * self.block_bytes / tier.bandwidth if tier.bandwidth else 0.0

    def _compute_seconds(self, count: int, first: int, tokens: int) -> float:
        """By how much reading a text takes longer without `count` blocks behind the first ones."""
        if self._step_time is None:
            return float("inf")
        size = self.kv.block_size

        def seconds(start: int) -> float:
            left = tokens - start
            return self._step_time.seconds(  # type: ignore[union-attr]
                Facts(0, 0, left, left * start + left * (left + 1) / 2, tokens, 1, 1)
            )

        return max(0.0, seconds(first * size) - seconds(min((first + count) * size, tokens - 1)))

    def take_in(self) -> list[Fetch]:
        """Hear of copies that have ended: what arrived can be found from now on. Returns who need not wait any more."""
        ready: list[Fetch] = []
        if not self._copies:
            return ready
        for tier in self.tiers:
            if tier.waiting:
                for done in tier.transport.poll():
                    self._ended(tier, done, ready)
            if tier._postponed and not tier.hanging:
                self._write_postponed(tier)
        now = self.clock()
        for number, copy in self._copies.values():
            if now > copy.until and not copy.is_late:
                copy.is_late = True
                self.kv.pool.hanging.add(number)
                copy.tier.hanging += 1
                for fetch in copy.waiting:
                    if self.fetches.get(id(fetch.request)) is fetch:
                        del self.fetches[id(fetch.request)]
                        fetch.request.failed_fetches = TRIES
                        copy.tier.stats.late += 1
                        ready.append(fetch)
        return ready

    def _ended(self, tier: Tier, done: Done, ready: list[Fetch]) -> None:
        number, copy = self._copies.pop((tier.transport.name, done.ticket))
        tier.waiting -= len(copy.identities)
        tier.hanging -= copy.is_late
        if copy.blocks is None:
            tier._writing.difference_update(copy.identities)
            tier.stats.written += done.arrived
            tier.stats.unwritten += len(copy.identities) - done.arrived
        else:
            tier.learn(done.arrived * self.block_bytes, done.seconds)
            tier.stats.read += done.arrived
            tier.stats.failed += len(copy.blocks) - done.arrived
            if not copy.void:
                self._publish(copy, done.arrived)
            for identity in copy.identities:
                if self._coming.get(identity) is copy:
                    del self._coming[identity]
            for fetch in copy.waiting:
                fetch.under_way -= 1
                fetch.request.failed_fetches += done.arrived < len(copy.blocks)
                if not fetch.under_way and self.fetches.get(id(fetch.request)) is fetch:
                    del self.fetches[id(fetch.request)]
                    ready.append(fetch)
        self.kv.pool.let_go(number)
        if done.failure is not None:
            tier.told(done, "kept" if copy.blocks is None else "arrived", len(copy.identities))

    def _publish(self, copy: _Copy, count: int) -> None:
        for identity, block in zip(copy.identities[:count], copy.blocks or []):
            if self.kv.index.publish(identity, block, copy.salt):
                self.kv.pool.mark_content(block, True)
                self.kv.arrived(copy.waiting[0].request.identities, identity, block, copy.salt)

    # Books

    def gave_up(self, request: Holder) -> None:
        """It ended while blocks were on their way: these arrive all the same."""
        self.fetches.pop(id(request), None)

    def discard(self, identities: list[bytes]) -> None:
        """They do not hold what they are named."""
        wrong = set(identities)
        for tier in self.tiers:
            tier.transport.discard(identities)
        for _, copy in self._copies.values():
            copy.void |= not wrong.isdisjoint(copy.identities)

    def forget(self, salt: str | None) -> None:
        for tier in self.tiers:
            tier.transport.forget(salt)
        for _, copy in self._copies.values():
            copy.void |= salt is None or copy.salt == salt

    def lose_memory(self) -> None:
        """The device's memory is lost: what arrives there is not to be found, nor what is copied from it."""
        for _, copy in self._copies.values():
            copy.void = True
            if copy.blocks is None:
                copy.tier.transport.discard(copy.identities)

    def wait(self, seconds: float) -> None:
        """For whoever can do nothing before a copy has ended."""
        self._bell.wait(seconds)

    def close(self) -> None:
        for tier in self.tiers:
            tier.transport.close()

    def check_integrity(self, waiting: set[int]) -> None:
        """Every ticket holds its blocks, and whoever blocks are on their way for (by id()) waits, and nobody else."""
        held = set(self.kv.pool.held)
        if {number for number, _ in self._copies.values()} != held:
            raise AssertionError(f"{len(self._copies)} transfers are under way, but {len(held)} hold blocks")
        if self.fetches.keys() != waiting:
            raise AssertionError(f"{len(waiting)} requests wait for transfers, but {len(self.fetches)} are expected")

    def _hold(self, ticket: int, copy: _Copy, blocks: list[int], seconds: float) -> None:
        self._number += 1
        copy.until = self.clock() + max(PATIENCE, TIMES_LATE * seconds)
        copy.tier.waiting += len(copy.identities)
        self._copies[copy.tier.transport.name, ticket] = self._number, copy
        self.kv.pool.hold(self._number, blocks)
