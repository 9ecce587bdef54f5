"""HitDensity: learns how many hits a block of some class and age brings for the time that it is kept."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np

CLASSES = 256
EPOCHS = 512  # that are remembered
FADE = 0.97  # of what was learned, kept per rebuilding
PRIOR = 64.0  # blocks for which a class is believed to be like all others

# Ages in epochs fall into bins: 8 of one epoch, then 4 for each doubling.
EDGES = [*range(8), *(2**octave * (4 + part) // 4 for octave in range(3, 9) for part in range(4)), EPOCHS]
BIN = [bin for bin, (low, high) in enumerate(pairwise(EDGES)) for _ in range(low, high)]
BINS = len(EDGES) - 1
_WIDTH = np.diff(np.array(EDGES, dtype=np.float64))


class HitDensity:
    """Blocks become free (`enter`), and are found again or not (`found`): hits per block and epoch, by class and age.

    A block that was evicted stays in the books, so it does not depend on what was evicted. The density of
    a class at an age is that of the best plan: over all moments to give the block up if nobody has come until then, the
    most hits per epoch of waiting. (That is the Gittins index of a block, and evicting the least of it is optimal for
    blocks whose next uses are independent.)
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.table: list[list[float]] = [[0.0] * BINS for _ in range(CLASSES)]
        self.totals = [0] * EPOCHS  # blocks by the epoch in which they became free last, a ring
        self._alive = array("i", bytes(4 * EPOCHS * CLASSES))  # the same by class: [epoch, class]
        self._hits = array("d", bytes(8 * CLASSES * BINS))  # [class, age]
        self._exposure = np.zeros((CLASSES, BINS))
        self._rebuilt = 0

    def enter(self, kind: int) -> None:
        place = self.epoch % EPOCHS
        self._alive[place * CLASSES + kind] += 1
        self.totals[place] += 1

    def leave(self, kind: int, epoch: int, blocks: int = 1) -> None:
        if self.epoch - epoch < EPOCHS:
            place = epoch % EPOCHS
            self._alive[place * CLASSES + kind] -= blocks
            self.totals[place] -= blocks

    def found(self, kind: int, epoch: int, blocks: int = 1) -> None:
        age = self.epoch - epoch
        if age < EPOCHS:
            self._hits[kind * BINS + BIN[age]] += blocks

    def tick(self) -> None:
        """The next epoch begins."""
        self.epoch += 1
        place = self.epoch % EPOCHS
        self._alive[place * CLASSES : (place + 1) * CLASSES] = array("i", bytes(4 * CLASSES))
        self.totals[place] = 0

    def rebuild(self, oldest: int, kinds: int) -> None:
        """Compute the table anew for the first `kinds` classes.

        Blocks that became free before epoch `oldest` may be forgotten and do not count.
        """
        passed, self._rebuilt = self.epoch - self._rebuilt, self.epoch
        alive = np.frombuffer(self._alive, dtype=np.int32).reshape(EPOCHS, CLASSES)
        at = self.epoch % EPOCHS
        newest_first = np.concatenate([alive[at::-1, :kinds], alive[:at:-1, :kinds]])
        by_age = np.maximum(newest_first, 0).astype(np.float64)
        by_age[max(0, self.epoch - oldest) + 1 :] = 0
        hits = np.frombuffer(self._hits, dtype=np.float64).reshape(CLASSES, BINS)
        self._exposure *= FADE
        self._exposure[:kinds] += passed * np.add.reduceat(by_age, EDGES[:-1], axis=0).T
        hits *= FADE  # in place: the array's own memory
        self.table[:kinds] = densities(hits[:kinds], self._exposure[:kinds]).tolist()


def densities(
    hits: np.ndarray,  # [classes, bins]
    exposure: np.ndarray,  # [classes, bins], blocks times epochs
) -> np.ndarray:  # [classes, bins]
    """Most hits per epoch that a block of this class and age can be kept for."""
    overall = (hits.sum(axis=0) + 1e-6) / (exposure.sum(axis=0) + 1.0)
    rate = (hits + PRIOR * overall) / (exposure + PRIOR)  # per epoch and block
    stays = np.exp(-rate * _WIDTH)  # that nobody comes within the bin
    best = np.zeros_like(rate)
    for age in range(BINS):
        alive = np.concatenate([np.ones((len(rate), 1)), np.cumprod(stays[:, age:-1], axis=1)], axis=1)
        came = alive * (1 - stays[:, age:])
        waited = came / rate[:, age:]
        best[:, age] = (np.cumsum(came, axis=1) / np.cumsum(waited, axis=1)).max(axis=1)
    return best  # type: ignore[no-any-return]
