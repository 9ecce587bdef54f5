"""KVManager: gives blocks to requests, finds cached prefixes, forks with copy-on-write, and takes blocks back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenmill.kv.eviction import policy_for
from tokenmill.kv.eviction.policy import NO_BLOCK, EvictionPolicy
from tokenmill.kv.moves import Move
from tokenmill.kv.pool import BlockPool
from tokenmill.kv.prefix import IdentityChains, PrefixIndex
from tokenmill.kv.pruning import Compaction, PrunedPrefix, Pruning

if TYPE_CHECKING:
    from tokenmill.kv.transfers import Transfers


class Holder(Protocol):
    """What the manager needs to know of a request (and may change)."""

    tokens: list[int]  # known tokens
    blocks: list[int]
    num_computed: int
    num_published: int  # leading blocks of its text that are in the prefix index, or were
    pruned: int  # tokens that have no slot in the blocks any more
    identities: list[bytes]  # of its full blocks, computed lazily
    salt: str
    adapter_key: str
    last_step: int  # number of the newest step that computes some of its tokens
    failed_fetches: int  # times that blocks which were on their way did not arrive, since it last ran
    num_exact: int  # leading tokens whose keys and values follow from the tokens before them alone
    in_float32: bool  # computed after all others of its steps: nobody shares what it fills


class Publisher(Holder, Protocol):
    """One whose blocks may be found by others."""

    prompt_len: int


@dataclass
class CacheStats:
    """Prefix-cache counters, in tokens."""

    queried: int = 0
    hit: int = 0
    placed: int = 0  # copied from modules
    evicted_blocks: int = 0
    pruned: int = 0  # tokens whose keys and values were dropped while their request ran
    kept: int = 0  # tokens that survived beside them


class KVManager:
    """The only code that moves blocks between requests, the prefix index and the pool.

    A request's blocks:  [ in the prefix index, perhaps shared | full, its own | tail, its own ]
                         0                                     num_published                   len(blocks)
    Steps write only what lies after num_published, so shared blocks never change; a fork copies the tail. Where it is
    pruned, fewer blocks stand for the text before the recent window (`pruning.py`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        eviction: str = "lru",
        pruning: Pruning | None = None,
    ) -> None:
        self.block_size, self.pruning = block_size, pruning
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex()
        self._chains = IdentityChains(block_size, pruning.name if pruning is not None else "")
        self.eviction = policy_for(eviction, num_blocks, block_size) if prefix_caching else None
        self.pool = BlockPool(num_blocks, on_evict=self._evicted, eviction=self.eviction)
        self.stats = CacheStats()
        self.transfers: Transfers | None = None  # to and from other places, where there are any
        self._unproven: list[tuple[int, int]] = []  # (step, block): can be found, though the step is not done yet

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def slots_for(self, tokens: int) -> int:
        """That a request needs at some time which reads so many tokens from its beginning."""
        return tokens if self.pruning is None else self.pruning.most_slots(tokens)

    def match(self, request: Holder, skip: int | None = None) -> list[int]:
        """Cached blocks that hold the request's first tokens, no more than `skip`; one at least is left to compute."""
        if not self.prefix_caching:
            return []
        names = self.names(request)
        if skip is not None:
            names = names[: skip // self.block_size]
        return self.index.find_leading(names) if self.pruning is None else self._match_pruned(names, self.pruning)

    def _match_pruned(self, names: list[bytes], pruning: Pruning) -> PrunedPrefix:
        """The longest beginning whose blocks are all there, pruned as they are when its last step begins."""
        size, find = self.block_size, self.index.find_leading
        sinks = find(names[: pruning.sinks // size])
        survivors: list[int] = []  # of all segments that are there from the first one on
        ends = [0]  # how many of them, by number of segments
        whole = len(sinks) * size == pruning.sinks
        for segment in range(pruning.segments(pruning.at(len(names) * size)) if whole else 0):
            wanted = pruning.survivors(names, segment)
            found = find(wanted)
            if len(found) < len(wanted):
                break
            survivors += found
            ends.append(len(survivors))
        for start in range(len(names) * size // pruning.segment * pruning.segment, -1, -pruning.segment):
            pruned = pruning.at(start)
            if (segments := pruning.segments(pruned)) >= len(ends):
                continue
            first = pruning.first_raw(pruned) // size
            raw = find(names[first : (start + pruning.segment) // size])
            if (first + len(raw)) * size >= start:
                before = sinks + survivors[: ends[segments]] if segments else []
                return PrunedPrefix(before + raw, pruned)
        return PrunedPrefix([], 0)

    def names(self, request: Holder) -> list[bytes]:
        """Identities of the blocks that a request may start on."""
        return self._identities(request, (len(request.tokens) - 1) // self.block_size)

    def chain(self, salt: str, tokens: list[int]) -> list[bytes]:
        """Identities of the full blocks of a sequence."""
        names: list[bytes] = []
        self._chains.extend(names, salt, tokens, len(tokens) // self.block_size)
        return names

    def needed(self, hits: list[int], tokens: int) -> int:
        """Free blocks that starting a request of so many tokens on these hits takes out of the pool."""
        return self.blocks_for(self.slots_for(tokens)) - len(hits) + self.revived(hits)

    def revived(self, blocks: list[int]) -> int:
        """How many of these nobody uses now."""
        references = self.pool.references
        return sum([references[block] == 0 for block in blocks])

    def admit(self, request: Holder, hits: list[int]) -> None:
        """Start the request on its cached prefix."""
        if self.eviction is not None:
            self.eviction.asked(request.identities, hits, len(request.tokens) // self.block_size)
        self.pool.share(hits)
        request.blocks = list(hits)
        request.pruned = hits.pruned if isinstance(hits, PrunedPrefix) else 0
        request.num_computed = len(hits) * self.block_size + request.pruned
        request.num_published = request.num_computed // self.block_size
        request.num_exact = sys.maxsize
        if self.prefix_caching:
            self.stats.queried += len(request.tokens)
            self.stats.hit += request.num_computed
        if self.transfers is not None and hits:
            self.transfers.used_again(hits)

    def grow(self, request: Holder, slots: int) -> list[int] | None:
        """Take blocks until the request has so many slots; None (and nothing taken) if they do not fit."""
        missing = self.blocks_for(slots) - len(request.blocks)
        if missing > self.pool.num_free:
            return None
        fresh = [self.pool.take() for _ in range(missing)]
        request.blocks += fresh
        return fresh

    def fork(self, parent: Holder, child: Holder, tokens: int) -> list[Move]:
        """Start `child` on the first `tokens` of `parent`: full blocks are shared, a partial one is copied.

        Returns what the next step moves first. The caller checked `num_free`.
        """
        whole, rest = divmod(tokens - parent.pruned, self.block_size)
        for block in parent.blocks[:whole]:
            self.pool.references[block] += 1  # the parent holds one, so it is not in the free list
        child.blocks = parent.blocks[:whole]
        child.num_computed, child.pruned = tokens, parent.pruned
        child.num_exact = parent.num_exact
        child.num_published = min(parent.num_published, tokens // self.block_size)
        child.identities = parent.identities[: child.num_published]
        if not rest:
            return []
        copy = self.pool.take()
        child.blocks.append(copy)
        return [Move(parent.blocks[whole], copy)]

    def publish(self, request: Publisher) -> None:
        """Offer the request's full blocks whose tokens are known to later requests."""
        if not self.prefix_caching or request.in_float32:
            return
        full = min(request.num_computed, len(request.tokens), request.num_exact) // self.block_size
        if full <= request.num_published:
            return
        identities = self._identities(request, full)
        gone = request.pruned // self.block_size
        for number in range(request.num_published, full):
            block = request.blocks[number - gone]
            if self.index.publish(identities[number], block, request.salt):
                self.pool.mark_content(block, True)
                self._unproven.append((request.last_step, block))
                if self.eviction is not None:
                    self._describe(self.eviction, request, number)
        request.num_published = full

    def can_fork(self, parent: Holder, tokens: int) -> bool:
        """Whether what the parent has of these leading tokens is what their successor sees."""
        return self.pruning is None or parent.pruned <= self.pruning.at(tokens)

    def compaction_need(self, request: Holder, furthest: int) -> int | None:
        """Blocks that its next step takes out of the pool if it goes so far; None: nothing is due to be dropped."""
        pruning = self.pruning
        if pruning is None or (pruned := pruning.at(request.num_computed)) == request.pruned:
            return None
        if pruned != request.pruned + pruning.segment - pruning.kept:
            raise AssertionError(f"{request} is at {request.num_computed} with {request.pruned} tokens pruned")
        kept = pruning.kept // self.block_size
        held = len(request.blocks) - pruning.segment // self.block_size  # without survivors
        cached = self._cached_survivors(request, pruning)
        if cached:
            taken, held = sum(self.pool.references[block] == 0 for block in cached), held + kept
        else:
            spare = len(request.blocks) - self.blocks_for(request.num_computed - request.pruned)
            taken = max(0, kept - spare)
            held += taken
        return taken + max(0, self.blocks_for(furthest - pruned) - held)

    def is_being_filled(self, request: Holder, step: int) -> bool:
        """Whether this step computes what the request would drop: others may fill blocks that it has started on."""
        pruning = self.pruning
        assert pruning is not None
        first = (pruning.sinks + pruning.segments(request.pruned) * pruning.kept) // self.block_size
        sources = request.blocks[first : first + pruning.segment // self.block_size]
        return any(number == step and block in sources for number, block in self._unproven)

    def compact(self, request: Holder, step: int) -> tuple[Compaction | None, int]:
        """Drop what is due of the request's oldest segment, or take what somebody has left of the same text.

        Returns what the step does first, if anything, and from which of its blocks on the request has other ones. The
        caller asked for its `compaction_need`.
        """
        pruning, size = self.pruning, self.block_size
        assert pruning is not None
        segment = pruning.segments(request.pruned)
        first = (pruning.sinks + segment * pruning.kept) // size
        position = pruning.sinks + segment * pruning.segment
        sources = request.blocks[first : first + pruning.segment // size]
        survivors = self._cached_survivors(request, pruning)
        compaction = None
        if survivors:
            self.pool.share(survivors)
        elif pruning.kept:
            unused = self.blocks_for(request.num_computed - request.pruned)
            while len(survivors) < pruning.kept // size:
                survivors.append(request.blocks.pop() if len(request.blocks) > unused else self.pool.take())
            compaction = Compaction(tuple(sources), tuple(survivors), position)
            self._publish_survivors(request, pruning, segment, survivors, step)
        request.blocks[first : first + pruning.segment // size] = survivors
        self.pool.release(sources, step)
        request.pruned += pruning.segment - pruning.kept
        self.stats.pruned += pruning.segment - pruning.kept
        self.stats.kept += pruning.kept
        return compaction, first

    def _named_survivors(self, request: Holder, pruning: Pruning) -> list[bytes]:
        """Of the segment that is next; none where its text is nobody's to find."""
        segment = pruning.segments(request.pruned)
        end = (pruning.sinks + (segment + 1) * pruning.segment) // self.block_size
        return pruning.survivors(request.identities, segment) if request.num_published >= end else []

    def _cached_survivors(self, request: Holder, pruning: Pruning) -> list[int]:
        names = self._named_survivors(request, pruning)
        found = self.index.find_leading(names)
        return found if len(found) == len(names) else []

    def _publish_survivors(self, request: Holder, pruning: Pruning, segment: int, blocks: list[int], step: int) -> None:
        for name, block in zip(self._named_survivors(request, pruning), blocks, strict=False):
            if self.index.publish(name, block, request.salt):
                self.pool.mark_content(block, True)
                self._unproven.append((step, block))

    def settle(self, step: int) -> None:
        """Step `step` and all before it are done: what they filled is there, what they read may be given away."""
        if self._unproven:
            proven = [block for number, block in self._unproven if number <= step]
            self._unproven = [entry for entry in self._unproven if entry[0] > step]
            if self.transfers is not None and proven:
                self.transfers.proven(proven)
        self.pool.settle(step)

    @property
    def unproven(self) -> set[int]:
        """Blocks that can be found, though the steps that fill them are not done."""
        return {block for _, block in self._unproven}

    def void(self, step: int) -> None:
        """Every launched step failed, the newest is `step`: nobody may find what they were to fill."""
        for _, block in self._unproven:
            if self.index.forget(block):
                self.pool.mark_content(block, False)
        self._unproven = []
        self.settle(step)

    def forget(self, request: Holder) -> None:
        """Nobody may find what lies in the request's blocks, or was copied from them."""
        if self.transfers is not None:
            names = map(self.index.name_of, request.blocks)
            self.transfers.discard([name[0] for name in names if name is not None])
        for block in request.blocks:
            if self.index.forget(block):
                self.pool.mark_content(block, False)

    def release(self, request: Holder, fence: int) -> None:
        """Take back everything the request holds, once step `fence` is settled."""
        self.pool.release(request.blocks, fence)
        request.blocks = []
        request.num_computed = 0
        request.num_published = 0
        request.pruned = 0

    def reset_prefix_cache(self, salt: str | None = None) -> None:
        """Forget all cached content, or that of one salt, wherever it is; blocks in use stay in use."""
        if self.transfers is not None:
            self.transfers.forget(salt)
        for block in self.index.blocks(salt):
            self.index.forget(block)
            self.pool.mark_content(block, False)

    def lose_memory(self) -> None:
        """What is on the device is lost, and what was on its way from or to it; what other places hold is not."""
        if self.transfers is not None:
            self.transfers.lose_memory()
        for block in self.index.blocks():
            self.index.forget(block)
            self.pool.mark_content(block, False)

    def check_integrity(self, requests: Iterable[Holder]) -> None:
        """Prove that no block is lost, leaked or doubly owned, and that the index and the pool agree."""
        self.pool.check_integrity([request.blocks for request in requests])
        known = set(self.index.blocks())
        marked = {block for block, has in enumerate(self.pool.has_content) if has}
        if known != marked:
            raise AssertionError(f"index and pool disagree about the content of blocks {sorted(known ^ marked)[:8]}")

    def _identities(self, request: Holder, full_blocks: int) -> list[bytes]:
        chain = request.identities
        if len(chain) < full_blocks:
            self._chains.extend(chain, request.salt, request.tokens, full_blocks, request.adapter_key)
        return chain if len(chain) == full_blocks else chain[:full_blocks]

    def _describe(self, eviction: EvictionPolicy, request: Publisher, number: int) -> None:
        """Tell the policy what was published."""
        size = self.block_size
        parent = self.index.block_of(request.identities[number - 1]) if number else None
        eviction.stored(
            request.blocks[number],
            request.identities[number],
            NO_BLOCK if parent is None else parent,
            number,
            (number + 1) * size > request.prompt_len,
            request.salt,
            len(request.tokens) // size - number,
        )

    def arrived(self, chain: list[bytes], identity: bytes, block: int, salt: str) -> None:
        """Tell the policy what came from another place, for a request with these identities."""
        if self.eviction is None:
            return
        number = chain.index(identity)
        parent = self.index.block_of(chain[number - 1]) if number else None
        before = NO_BLOCK if parent is None else parent
        self.eviction.stored(block, identity, before, number, False, salt, len(chain) - number)

    def _evicted(self, block: int) -> None:
        self.index.forget(block)
        self.stats.evicted_blocks += 1
