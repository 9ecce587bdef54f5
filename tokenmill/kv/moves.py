"""Move and Placement: what is copied from one place to another at the start of a step, before anything is computed.

Whoever plans one sees to it that the source is kept and the target is given to nobody until the step is settled
(`BlockPool.release` with the step's number as its fence).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Place(enum.Enum):
    """Where blocks lie. A tier below the device's memory (offload to host, disk) is another one: runners have to learn
    of it, and refuse moves that they cannot make.
    """

    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Move:
    source: int
    target: int
    source_place: Place = Place.DEVICE
    target_place: Place = Place.DEVICE


@dataclass(frozen=True, slots=True)
class Placement:
    """Keys and values of tokens that stand elsewhere in a row than where they were computed: keys are turned by the way
    between, and what is copied are tokens, not blocks.
    """

    row: int
    first: int  # position in the row of the first token
    count: int
    source: int  # position that it was computed at
    blocks: tuple[int, ...]  # those of the sequence that it was computed in, from its first one on
