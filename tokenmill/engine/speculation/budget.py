"""How many drafts a step verifies: the most probable ones, as long as they make more tokens per second likely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORTHWHILE = 1.02  # how much more tokens per second must be expected: estimates are not exact


def admit(
    chances: Sequence[Floats],  # of every row that has a draft: that so many of its tokens hold
    rows: int,  # that decode, with drafts or without
    most: int,  # drafts that there is room for
    seconds: Callable[[Ints], Floats],  # that steps of so many tokens take
    without: float | None = None,  # seconds of a step without drafts, where that is another kind of step
) -> list[int]:  # of every entry of `chances`: how many of its tokens are verified
    """Best first over all rows, so that length follows from what each has to offer, and none may be best."""
    if not chances or most <= 0:
        return [0] * len(chances)
    all_chances = np.concatenate(chances)
    owners = np.repeat(np.arange(len(chances)), [len(one) for one in chances])
    best = np.argsort(-all_chances, kind="stable")[:most]  # a token never comes before the one that it follows
    expected = rows + np.concatenate([[0.0], np.cumsum(all_chances[best])])
    rate = expected / seconds(np.arange(rows, rows + len(best) + 1))
    if without is not None:
        rate[0] = rows / without
    count = int(np.argmax(rate))
    if rate[count] < WORTHWHILE * rate[0]:
        count = 0
    admitted: list[int] = np.bincount(owners[best[:count]], minlength=len(chances)).tolist()
    return admitted
