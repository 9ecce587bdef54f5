"""Recordings: which kinds and sizes of decode steps are recorded, and which recording serves a step."""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tokenmill.engine.step import DRAFTED, NODES, Step
from tokenmill.sampling.sampler import Sampled
from tokenmill.sampling.settings import Traits

STRETCH = 2  # a size without a recording may be padded to so many times its rows: a replay costs no launches
PATIENCE = 4  # times that happens before a size gets a recording of its own, which costs about two plain runs
PLAIN = Traits()

Graph = TypeVar("Graph")


class Kind(enum.Enum):
    """What a recorded step does besides decoding."""

    PLAIN = "plain"
    SHARED = "shared"  # rows share a beginning, which is read once
    DRAFTS = "drafts"  # rows start where the device says and verify drafts: a size counts tokens, not rows
    # The same, with as many tokens of every row: its keys are read once for all of them
    CHAINS_OF_2 = "chains of 2"
    CHAINS_OF_3 = "chains of 3"
    CHAINS_OF_5 = "chains of 5"
    TREES = "trees"  # rows verify trees that the device drafted, or chains, and it drafts trees again

    @property
    def width(self) -> int:
        """Tokens of each row; those that a row lacks are padded."""
        return 1 + NODES if self is Kind.TREES else WIDTHS.get(self, 1)

    @property
    def kept(self) -> int:
        """How many of these may hold."""
        return 1 + DRAFTED if self is Kind.TREES else self.width


TREE_ROWS = 8  # of more rows than that no trees are verified
WIDTHS = {Kind.CHAINS_OF_2: 2, Kind.CHAINS_OF_3: 3, Kind.CHAINS_OF_5: 5}
CHAINS_FILL = 0.6  # of the tokens of chains at least so many are no padding


def chains_for(step: Step) -> Kind:
    """How a step that verifies drafts is recorded."""
    longest, least = max(step.counts), CHAINS_FILL * len(step.counts)
    for kind, width in WIDTHS.items():
        if longest <= width:
            return kind if step.num_tokens >= least * width else Kind.DRAFTS
    return Kind.DRAFTS


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are recorded; a step is padded to the next one. Finer where a row more costs relatively more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass
class Recording(Generic[Graph]):
    """What is known of steps of one size."""

    uses: int = 0  # runs at this size
    lent: int = 0  # steps of this size that a larger recording served
    refused: bool = False  # could not be recorded: it is run plainly
    graph: Graph | None = None
    sampled: Sampled | None = None  # [bucket]: where a replay leaves the sampled tokens


@dataclass
class Recordings(Generic[Graph]):
    """Which recording serves a step, and when a size gets one of its own.

    A batch that ends passes through every size for a step or two. To run each plainly and then to record it would cost
    the host's launches in every one of these steps, so a larger size takes them in at first.
    """

    sizes: list[int]  # ascending
    stretch: float = STRETCH
    warm: bool = False  # whether steps of every size have been run before the first request
    _of: dict[tuple[int, Traits, Kind], Recording[Graph]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return all(recording.graph is None for recording in self._of.values())

    def is_due(self, recording: Recording[Graph]) -> bool:
        """Whether a step that is about to run is to be recorded first: its size has returned, and libraries know it."""
        returned = recording.uses > 1 or (self.warm and recording.lent >= PATIENCE)
        return returned and recording.graph is None and not recording.refused

    def next_size(self, rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, rows)]

    def of(self, size: int, traits: Traits = PLAIN, kind: Kind = Kind.PLAIN) -> Recording[Graph]:
        return self._of.setdefault((size, traits, kind), Recording())

    def serve(
        self, rows: int, traits: Traits = PLAIN, kind: Kind = Kind.PLAIN, may_record: bool = True
    ) -> tuple[int, Recording[Graph]]:
        """The size at which a step of so many rows is run, and what there is for it."""
        place = bisect_left(self.sizes, rows)
        own = self.sizes[place]
        recording = self.of(own, traits, kind)
        if recording.graph is None and (recording.lent < PATIENCE or recording.refused or not may_record):
            near = [size for size in self.sizes[place + 1 :] if size <= self.stretch * own]
            known = [(size, one) for size in near if (one := self._of.get((size, traits, kind))) is not None]
            recorded = [pair for pair in known if pair[1].graph is not None]
            tried = [pair for pair in known if pair[1].uses > 0 and not pair[1].refused]  # it is recorded now
            for size, larger in (recorded or tried)[:1]:
                recording.lent += 1
                return size, larger
        return own, recording
