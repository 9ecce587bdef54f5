"""VerifyTime: how long steps of so many tokens take here and now, learned from the steps that only decode."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SIZES = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024])
LARGEST_SURPRISE = 0.4  # of a step, in its logarithm: others' work on the machine must not count for more
SLOWEST = 0.03  # how fast the shape follows a new step, at last
DRIFT = 0.15  # and how fast the level does: what slows one size slows all, mostly


class VerifyTime:
    """A level that follows all steps (contexts grow, machines are shared), and a shape over the number of tokens.

    The shape starts as `per_token`, what a token more costs in shares of a step with one. Between sizes that were seen
    it is interpolated, and beyond them it goes on as it started.
    """

    def __init__(self, per_token: float) -> None:
        self._prior: Floats = np.log1p(per_token * (SIZES - 1))
        self._off = np.zeros(len(SIZES))  # by how much each size differs from that
        self._seen = np.zeros(len(SIZES), dtype=np.int64)
        self._level: float | None = None  # logarithm of seconds
        self._curve = self._prior

    @property
    def known(self) -> bool:
        return self._level is not None

    def learn(self, tokens: int, seconds: float) -> None:
        at = int(np.searchsorted(SIZES, min(tokens, SIZES[-1])))
        measured = float(np.log(max(seconds, 1e-7)))
        if self._level is None:
            self._level = measured - self._prior[at]
        surprise = measured - self._level - self._curve[at]
        surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._seen[at] += 1
        rate = max(SLOWEST, 1 / (1 + self._seen[at]))
        self._off[at] = self._curve[at] - self._prior[at] + rate * (1 - DRIFT) * surprise
        self._level += DRIFT * surprise
        seen = np.flatnonzero(self._seen)
        self._curve = self._prior + np.interp(np.arange(len(SIZES)), seen, self._off[seen])
        self._curve = np.maximum.accumulate(self._curve)  # more tokens never take less

    def seconds(self, tokens: Ints) -> Floats:
        curve: Floats = np.exp((self._level or 0.0) + np.interp(tokens, SIZES, self._curve))
        return curve
