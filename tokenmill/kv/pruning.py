"""Pruning: which keys and values of a prefix are dropped when, as a function of how far the row has come; no torch.

    [ sinks | survivors of segment 0, of segment 1, ... | recent window, less than one segment longer than asked for ]

The text behind the sinks is cut into segments of equal length. A segment that lies wholly before the recent window is
compacted, in one piece, just before a token at a multiple of the segment's length is computed: of its tokens a fixed
number survives in every layer and head, though not everywhere the same ones. So tables and block counts are known to
the host without asking the device, one table serves all layers, and neither the chunks that a prompt is read in nor
who else is in a batch can change what a token sees.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tokenmill.errors import ConfigError

SINKS, SEGMENT = 16, 128  # tokens; of blocks that are larger, whole ones


@dataclass(frozen=True, slots=True)
class Compaction:
    """What survives of these blocks goes to those, at the start of a step and before anything is computed."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    position: int  # of the first token in the sources


class PrunedPrefix(list[int]):
    """Cached blocks that a request may start on, some of which hold the survivors of whole segments."""

    def __init__(self, blocks: list[int], pruned: int) -> None:
        super().__init__(blocks)
        self.pruned = pruned  # tokens of the prefix that have no slot


@dataclass(frozen=True)
class Pruning:
    """A policy's name and sizes, in tokens. All sizes are multiples of the block size."""

    policy: str  # who survives: see `engine/runner/pruner.py`
    sinks: int
    window: int
    segment: int
    kept: int  # of a segment
    block_size: int

    @classmethod
    def of(cls, policy: str, keep: float, window: int, block_size: int) -> Pruning:
        sinks, segment = (-(-size // block_size) * block_size for size in (SINKS, SEGMENT))
        kept = 0 if policy == "window" else keep * segment
        if kept % block_size:
            raise ConfigError(
                f"kv_pruning_keep is {keep:g}, which leaves {kept:g} of the {segment} tokens of a segment; with blocks "
                f"of {block_size} tokens it must be a multiple of {block_size / segment:g}"
            )
        return cls(policy, sinks, -(-window // block_size) * block_size, segment, int(kept), block_size)

    @property
    def name(self) -> str:
        """What pruned keys and values depend on besides their text: a part of the identity of every block."""
        return f"{self.policy}/{self.sinks}/{self.window}/{self.segment}/{self.kept}"

    def at(self, position: int) -> int:
        """How many tokens have no slot when the one at `position` is computed."""
        before = position // self.segment * self.segment - self.window - self.sinks
        return max(0, before // self.segment) * (self.segment - self.kept)

    def chunk(self, position: int) -> int:
        """Tokens from here on that see the same tokens of all that is before them: as many a step may compute."""
        return self.segment - position % self.segment

    def most_slots(self, tokens: int) -> int:
        """Slots that a row needs at some time while it reads so many tokens.

        Most while a segment is compacted: what it had stays until the step is done, which also fills the next chunk.
        """
        last = max(0, tokens - 1) // self.segment * self.segment  # where something was compacted, at last
        most = tokens - self.at(last)
        for position in (last - self.segment, last):
            before = self.at(max(0, position - self.segment))
            if position > 0 and self.at(position) > before:
                chunk = min(self.segment, tokens - position)
                most = max(most, position + chunk - before + self.kept)
        return most

    def segments(self, pruned: int) -> int:
        return pruned // (self.segment - self.kept)

    def first_raw(self, pruned: int) -> int:
        """Where the tokens begin that all have slots, behind the sinks and the survivors."""
        segments = self.segments(pruned)
        return self.sinks + segments * self.segment if segments else 0

    def survivors(self, chain: list[bytes], segment: int) -> list[bytes]:
        """Names of the blocks that hold them, from the names of the text's own blocks up to the segment's end."""
        end = (self.sinks + (segment + 1) * self.segment) // self.block_size
        return [
            hashlib.blake2b(chain[end - 1] + b"kept" + bytes([number]), digest_size=len(chain[end - 1])).digest()
            for number in range(self.kept // self.block_size)
        ]
