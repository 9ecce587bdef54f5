"""Gate: what a waiting request needs and starts on, whether that fits, and what is brought to the device before."""

from __future__ import annotations

from tokenmill.engine.held import HeldSequence
from tokenmill.engine.request import Request, Wait
from tokenmill.engine.scheduler.batching import Batching
from tokenmill.engine.scheduler.control import Pace
from tokenmill.engine.scheduler.lifecycle import RUNNING, Lifecycle, importance
from tokenmill.kv.transfers import TRIES

LOOK_AHEAD = 8  # waiting requests whose blocks are brought to the device before it is their turn


class Gate:
    """Looks at waiting requests and at memory; all that it does is to park a request until its blocks are there."""

    def __init__(self, life: Lifecycle, batching: Batching, pace: Pace) -> None:
        self.life, self.batching, self.pace = life, batching, pace
        self.kv, self.limits, self.waiting = life.kv, life.limits, life.waiting
        self.modules = life.modules
        self.step = 0  # number of the one that is being composed

    def admission_need(self, request: Request) -> tuple[list[int], int]:
        """Cached blocks to start from, and free blocks needed for what it starts with."""
        room = max(len(request.tokens), self.limits.reserved_tokens)
        if request.fork_from is not None and self.can_fork(request, request.fork_from):
            return [], self._fork_need(request.fork_from, request.fork_tokens, room)
        may_skip = _may_skip(request)
        hits = self.kv.match(request, may_skip) if may_skip else []
        sources = self.modules.blocks(request, len(hits)) if request.modules and self.modules is not None else []
        held = self.life.held.find(request.continues) if may_skip and self.batching.may_share else None
        skipped = 0 if held is None else min(held.num_computed, request.common_tokens, may_skip)
        if held is not None and skipped > len(hits) * self.kv.block_size and self.kv.can_fork(held, skipped):
            request.fork_from, request.fork_tokens = held, skipped
            return [], self._fork_need(held, skipped, room)
        return hits, self.kv.needed(hits, room) + self.kv.revived(sources)

    def _fork_need(self, parent: Request | HeldSequence, tokens: int, room: int) -> int:
        return self.kv.blocks_for(self.kv.slots_for(room)) - (tokens - parent.pruned) // self.kv.block_size

    def can_fork(self, request: Request, parent: Request | HeldSequence) -> bool:
        if not self.kv.can_fork(parent, request.fork_tokens):
            return False
        if isinstance(parent, HeldSequence):
            return parent.num_computed >= request.fork_tokens and not request.avoids_cache
        if parent.state is not RUNNING or request.avoids_cache:
            return False
        if request.beams is None and not self.batching.may_share:  # a parent that writes its prompt again
            return False
        # Copies come first in a step, so what the parent computes in this very step cannot be copied yet.
        dealt_now = parent.last_step == self.step
        return (parent.last_start if dealt_now else parent.num_computed) >= request.fork_tokens

    @property
    def has_free_row(self) -> bool:
        return bool(self.life.free_rows) and len(self.life.running) < self.pace.rows

    def free_soon(self) -> int:
        return self.kv.pool.num_free + self.kv.pool.num_fenced + self.kv.pool.num_held

    def fits(self, rows: int, blocks: int, free: int) -> bool:
        """Whether newcomers leave enough blocks for those who run to grow."""
        watermark = int(self.limits.watermark * self.kv.pool.num_blocks) if self.life.running else 0
        return rows <= len(self.life.free_rows) and blocks + watermark <= free

    def rank(self, request: Request) -> tuple[int, float, int]:
        return *importance(request), self.waiting.place(request)

    def look_ahead(self, now: float) -> None:
        """Copies take a while, so they start before it is a request's turn, as far as there is room for all before it;
        one look for each is enough."""
        blocks = 0
        for _, request in self.waiting.first(LOOK_AHEAD, now, self.life.may_promote()):
            free = self.kv.pool.num_free - blocks
            if not self.fits(0, 1, free):
                return
            need = self.admission_need(request)[1]
            if not self.fits(0, need, free):
                return
            if not request.looked_ahead:
                request.looked_ahead = True
                if self.fetch(request, free):
                    continue
            blocks += need

    def fetch(self, request: Request, free: int) -> bool:
        """Bring blocks to the device that are held elsewhere, if there is room for the request; it waits for them."""
        transfers = self.kv.transfers
        if transfers is None or request.failed_fetches >= TRIES or request.in_flight or request.beams is not None:
            return False
        if request.avoids_cache or request.reads_all or not self.kv.prefix_caching:
            return False
        hits, need = self.admission_need(request)
        if request.fork_from is not None and self.can_fork(request, request.fork_from):
            return False
        names, rank = self.kv.names(request), self.rank(request)
        if len(hits) == len(names) or not self.fits(0, need + transfers.expected_before(rank), free):
            return False
        if not transfers.fetch(request, hits, names, need, rank):
            return False
        transfers.swapped += request.metrics.preemptions > 0
        self.waiting.remove(request)
        self.life.park(request, Wait.TRANSFER)
        return True

    def lacks_modules(self, request: Request) -> bool:
        """Whether modules of its prompt are not there. They are computed, and it waits for them, once there is room for
        all of it: what is computed before may be evicted before it is let in."""
        if self.modules is None or not request.modules or not (missing := self.modules.missing(request)):
            return False
        if not self.life.running or self.fits(1, self.modules.room(request), self.kv.pool.num_free):
            self.modules.gather(request, missing)
        return True

    def take_in_transfers(self) -> None:
        """Copies of blocks have ended, well or not: whoever waited for them is queued again, at its old place."""
        if self.kv.transfers is not None:
            for fetch in self.kv.transfers.take_in():
                assert isinstance(fetch.request, Request)
                self.life.queue(fetch.request, place=fetch.rank[2])


def _may_skip(request: Request) -> int:
    """How many of its leading tokens need not be computed, where their keys and values are there."""
    if request.avoids_cache or request.pooling == "mean":
        return 0
    last = len(request.tokens) - 1
    return last if request.params.prompt_logprobs is None else min(last, request.scored_from - 1)
