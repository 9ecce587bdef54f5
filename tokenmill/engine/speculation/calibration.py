"""Calibration: how often drafts held, by who proposed them, what was known about them, and how far ahead they were."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.engine.speculation.proposer import MAX_DRAFTS, Draft, Proposer

PRIOR_WEIGHT = 6.0  # drafts that a proposer's own estimate counts for
LEARNING = 0.3  # how fast a request's own record moves with each draft that was more, or less, than expected
LARGEST_SHIFT = 3.0
MOST_COUNTED = 400.0  # older ones fade
MOST_LIKELY = 0.99

Floats = npt.NDArray[np.float64]


class Calibration:
    """Of one proposer. A draft's chance is conditional: that it holds if all before it do.

    It is counted on drafts whether they were verified or not: what was sampled in the end is compared with them, so a
    proposer that is switched off goes on being judged, and pays for nothing.
    """

    def __init__(self, proposer: Proposer) -> None:
        prior = [[proposer.prior(kind, depth) for depth in range(MAX_DRAFTS)] for kind in range(proposer.kinds)]
        self._tried = np.full((proposer.kinds, MAX_DRAFTS), PRIOR_WEIGHT)
        self._held: Floats = np.array(prior) * PRIOR_WEIGHT
        self._depths = _depths(4 * MAX_DRAFTS)

    def chances(self, draft: Draft, own: RequestRecord) -> Floats:  # [tokens of the draft]: that so many hold
        count = len(draft.tokens)
        # Several steps may be on their way, each with as many drafts as a step may have: those are drafted over.
        depths = self._depths[:count] if count <= len(self._depths) else _depths(count)
        each: Floats = self._held[draft.kinds, depths] / self._tried[draft.kinds, depths]
        return np.cumprod(np.minimum(own.shifted(each), MOST_LIKELY), dtype=np.float64)

    def count(self, kinds: Sequence[int], held: int, own: RequestRecord) -> None:
        """Of a chain with these kinds so many drafts held, and then one did not, if there was one more."""
        tried = min(held + 1, len(kinds))
        each = list(kinds[:tried]), self._depths[:tried]
        own.count(held, own.shifted(self._held[each] / self._tried[each]))
        self._tried[each] += 1
        self._held[list(kinds[:held]), self._depths[:held]] += 1
        if tried and self._tried[kinds[0], 0] > MOST_COUNTED:
            self._tried[kinds[0]] /= 2
            self._held[kinds[0]] /= 2


def _depths(count: int) -> npt.NDArray[np.int64]:
    return np.minimum(np.arange(count), MAX_DRAFTS - 1)  # beyond the last one it counts for all


class RequestRecord:
    """How one request's drafts do, compared with those of all: a shift of the logarithm of their odds."""

    __slots__ = ("_shift",)

    def __init__(self) -> None:
        self._shift = 0.0

    def shifted(self, chances: Floats) -> Floats:
        if self._shift == 0.0:
            return chances
        odds = chances * math.exp(self._shift)
        shifted: Floats = odds / (1 - chances + odds)
        return shifted

    def count(self, held: int, expected: Floats) -> None:
        """`expected`: the shifted chances of those that held, and of the one that did not."""
        surprise = held - float(expected.sum())
        self._shift = min(max(self._shift + LEARNING * surprise, -LARGEST_SHIFT), LARGEST_SHIFT)
