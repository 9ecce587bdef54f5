"""HeldSequences: what ended requests left behind for others to continue, with their keys and values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenmill.engine.request import Request
from tokenmill.kv.manager import KVManager


@dataclass(slots=True, eq=False)
class HeldSequence:
    """A sequence that no request computes. Its blocks are given up if they are needed; its tokens stay."""

    id: str
    tokens: list[int]
    salt: str
    adapter_key: str
    blocks: list[int]
    num_computed: int  # leading tokens whose keys and values lie in the blocks
    num_published: int
    pruned: int = 0
    identities: list[bytes] = field(default_factory=list)
    last_step: int = 0  # newest step that computed some of its tokens
    fence: int = 0  # and that reads its blocks, for itself or for who continues it
    num_exact: int = sys.maxsize  # what holds copies of modules is not kept
    failed_fetches: int = 0
    in_float32: bool = False


class HeldSequences:
    """By id, least recently used first. They may hold `most_blocks` together; beyond that the first give theirs up.

    Whoever continues one shares its full blocks and copies the last (`KVManager.fork`), so that nothing is computed
    again; one without blocks is computed again, but for what the prefix cache still has.
    """

    def __init__(self, kv: KVManager, most_blocks: int) -> None:
        self._kv, self._most = kv, most_blocks
        self._of: dict[str, HeldSequence] = {}
        self.num_blocks = 0  # references, so a block that two of them share counts twice
        self.given_up = 0  # times that one lost its blocks to somebody else

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(self._of.values())

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, id: str) -> bool:
        return id in self._of

    def take_over(self, request: Request) -> None:
        """An ended request's blocks go on to be held, without what it had room for beyond its tokens."""
        computed = min(request.num_computed, len(request.tokens))
        used, full = self._kv.blocks_for(computed - request.pruned), self._kv.blocks_for(computed)
        spare = request.blocks[used:]
        request.blocks = request.blocks[:used]
        one = HeldSequence(
            id=request.id,
            tokens=list(request.tokens),
            salt=request.salt,
            adapter_key=request.adapter_key,
            blocks=request.blocks,
            num_computed=computed,
            num_published=min(request.num_published, full),
            pruned=request.pruned,
            identities=request.identities[: min(request.num_published, full)],
            last_step=request.last_step,
            fence=request.fence,
            in_float32=request.in_float32,
        )
        request.blocks, request.num_computed, request.num_published, request.pruned = [], 0, 0, 0
        self._kv.pool.release(spare, request.fence)
        self.drop(request.id)  # a request of the same name, long ago
        self._of[one.id] = one
        self.num_blocks += used
        while self.num_blocks > self._most and self.give_up_oldest():
            pass

    def find(self, id: str | None) -> HeldSequence | None:
        """The newest from now on."""
        if id is None or (one := self._of.pop(id, None)) is None:
            return None
        self._of[id] = one
        return one

    def common_tokens(self, request: Request) -> int:
        """How many of its leading tokens are those of the sequence that it continues, of its salt and adapter."""
        one = self._of.get(request.continues or "")
        if one is None or (one.salt, one.adapter_key) != (request.salt, request.adapter_key):
            return 0
        low, high = 0, min(len(one.tokens), len(request.tokens))
        while low < high:
            middle = (low + high + 1) // 2
            if one.tokens[low:middle] == request.tokens[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def drop(self, id: str) -> None:
        """Nobody will continue it. Unknown ids are ignored: it may never have come to be held."""
        if (one := self._of.pop(id, None)) is not None:
            self._release(one)

    def give_up_oldest(self, but: HeldSequence | None = None) -> bool:
        """Take the blocks of the least recently used one that has any, for somebody who needs room."""
        for one in self._of.values():
            if one.blocks and one is not but:
                self._release(one)
                self.given_up += 1
                return True
        return False

    def void(self, oldest: int) -> None:
        """Launched steps from this one on failed: what they computed is not there."""
        for one in self._of.values():
            if one.blocks and one.last_step >= oldest:
                self._release(one)

    def forget(self, salt: str | None = None) -> None:
        """Take the blocks of all, or of those with one salt."""
        for one in self._of.values():
            if one.blocks and salt in (None, one.salt):
                self._release(one)

    def _release(self, one: HeldSequence) -> None:
        self.num_blocks -= len(one.blocks)
        self._kv.release(one, one.fence)
