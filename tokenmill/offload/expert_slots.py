"""ExpertSlots: which of a layer's experts is in which slot, which one has to leave, and how often each was there.

Plain numbers, which recorded steps read and write, too (ops/native/src/kernels/stream.cpp). A *call* is one layer's
choice of experts; calls are numbered. The slots and buffers of a layer are read in its own calls only.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tokenmill.plan.solve.offload import BUFFERS

AWAY = -1

Numbers = npt.NDArray[np.int64]


class Told(IntEnum):
    """What steps and whoever brings experts tell each other (routing.h says what is what)."""

    CALL = 0
    LAYER = 1
    ASKED = 2
    ANSWERED = 3
    STREAM = 4
    WISHED = 5
    MAY_FORESEE = 6
    FORESEES = 7
    STALLS = 8
    STALL_NS = 9
    HITS = 10
    MISSES = 11
    FORESEEN = 12


@dataclass(frozen=True)
class ExpertCounts:
    """Since the start. Experts, each counted once for a layer and step that chose it."""

    slots: int = 0  # of every layer
    experts: int = 0  # that it has
    hits: int = 0  # were in a slot, and nobody had foreseen them
    misses: int = 0  # had to be waited for
    foreseen: int = 0  # were brought, or on their way, because they were foreseen
    wasted: int = 0  # were brought because they were foreseen, and left unused


class ExpertSlots:
    """`number`: of a layer, among those with experts. Whoever changes anything here is alone, steps aside."""

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self.layers, self.experts, self.slots = layers, experts, slots
        self.told = np.zeros(len(Told), dtype=np.int64)
        self.slot = np.full((layers, experts), AWAY, dtype=np.int64)  # that an expert is in
        self.used, self.early = (np.zeros((layers, experts), dtype=np.int64) for _ in range(2))
        self.buffer = np.zeros((BUFFERS, experts), dtype=np.int64)  # 1: the expert is at its place there
        self.owner = np.full(BUFFERS, AWAY, dtype=np.int64)  # whose experts these are
        self.wish = np.zeros(experts, dtype=np.int64)  # the last call that foresaw this expert of the next layer
        self.wasted = 0
        self._content = np.full((layers, slots), AWAY, dtype=np.int64)  # the expert in a slot
        self._taken = np.zeros((layers, slots), dtype=bool)  # somebody comes

    def buffer_of(self, number: int) -> int:
        return number % BUFFERS

    def place(self, number: int, expert: int) -> int:
        """A slot; or, behind all slots, the expert's own place in the buffer; or AWAY."""
        if (slot := int(self.slot[number, expert])) >= 0:
            return slot
        return self.slots + expert if self.in_buffer(number, expert) else AWAY

    def in_buffer(self, number: int, expert: int) -> bool:
        buffer = self.buffer_of(number)
        return bool(self.owner[buffer] == number and self.buffer[buffer, expert])

    def take(self, number: int, kept: Set[int]) -> tuple[int, int] | None:
        """A slot for somebody who comes, and who has to leave it (AWAY: nobody): who was chosen longest ago, but none
        of these. None: there is no such slot.
        """
        content, taken, used = self._content[number], self._taken[number], self.used[number].tolist()
        leaving = [
            (used[expert] if expert >= 0 else AWAY, slot)
            for slot, expert in enumerate(content.tolist())
            if not taken[slot] and expert not in kept
        ]
        if not leaving:
            return None
        _, slot = min(leaving)
        before = int(content[slot])
        if before >= 0:
            self.slot[number, before] = AWAY
        content[slot], taken[slot] = AWAY, True
        return slot, before

    def give_back(self, number: int, slot: int, before: int) -> None:
        """As it was before it was taken: nothing has been written there."""
        self._taken[number, slot] = False
        self._content[number, slot] = before
        if before >= 0:
            self.slot[number, before] = slot

    def forget(self, number: int, expert: int) -> None:
        """Who has left for good, and was foreseen for nothing."""
        if expert >= 0 and self.early[number, expert]:
            self.early[number, expert] = 0
            self.wasted += 1

    def arrived(self, number: int, slot: int, expert: int) -> None:
        self._taken[number, slot] = False
        self._content[number, slot] = expert
        self.slot[number, expert] = slot

    def failed(self, number: int, slot: int) -> None:
        """Whatever lies there now, it is nobody."""
        self._taken[number, slot] = False

    def free_taken(self, coming: Set[tuple[int, int | None]]) -> None:
        """Slots, each with its layer, that nobody of these comes to."""
        for number, slot in np.argwhere(self._taken).tolist():
            if (number, slot) not in coming:
                self.failed(number, slot)

    def own(self, number: int) -> None:
        """Nothing that is in its buffer is another layer's from now on."""
        buffer = self.buffer_of(number)
        if self.owner[buffer] != number:
            self.owner[buffer] = AWAY
            self.buffer[buffer] = 0
            self.owner[buffer] = number

    # What a step does that is not recorded

    def call(self, number: int, chosen: Iterable[int]) -> int:
        """The next call. Counts what it finds; returns how many different experts were chosen."""
        told = self.told
        told[Told.CALL] += 1
        told[Told.LAYER] = number
        different = 0
        for expert in chosen:
            different += 1
            self.used[number, expert] = told[Told.CALL]
            if self.early[number, expert]:
                self.early[number, expert] = 0
                told[Told.FORESEEN] += 1
            else:
                told[Told.MISSES if self.place(number, expert) < 0 else Told.HITS] += 1
        return different

    def counts(self) -> ExpertCounts:
        told = self.told
        hits, misses, foreseen = (int(told[one]) for one in (Told.HITS, Told.MISSES, Told.FORESEEN))
        return ExpertCounts(self.slots, self.experts, hits, misses, foreseen, self.wasted)

    def check_integrity(self) -> None:
        """Slots and experts agree on who is where."""
        for number in range(self.layers):
            there = {int(expert): slot for slot, expert in enumerate(self._content[number]) if expert >= 0}
            assert there == {int(one): int(self.slot[number, one]) for one in np.flatnonzero(self.slot[number] >= 0)}
            assert not any(self._taken[number, slot] for slot in there.values())
