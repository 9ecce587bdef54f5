"""DeviceBudget: how many of the tokens that a device drafted every row verifies, judged by the clock.

To weigh drafts row by row takes the host longer than a small model's step takes a GPU. So all rows verify the same
number, and what steps with and without drafts took decides which: that has in it whatever the host does for them, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.engine.speculation.budget import WORTHWHILE
from tokenmill.step_time import FittedStepTime

LENGTHS = (1, 2, 4)  # drafts per row, for which steps are recorded (runner/cuda_graphs.py)
SETTLE = 4  # steps without drafts, and then with, that a number of rows begins with
FIRST_PAUSE, LONGEST_PAUSE = 256, 16384  # steps without drafts before they are tried again, where they do not pay
TURNS, PLAIN_TURNS = 1024, 4  # of so many steps that many are plain where drafts pay: what they are compared with
PRIOR, PRIOR_WEIGHT = 0.5, 6.0  # of drafts that hold, before any were counted
MOST_COUNTED = 1000.0  # drafts; older ones fade


class _Case:
    """Of a number of rows."""

    __slots__ = ("pause", "resting", "trying", "turn")

    def __init__(self) -> None:
        self.turn = 0
        self.trying = SETTLE  # steps that verify drafts, whatever is known
        self.resting, self.pause = SETTLE, FIRST_PAUSE  # steps that verify none


class DeviceBudget:
    """Chances are those of all requests: a device drafts for all of them alike."""

    def __init__(self, length: int, plain: FittedStepTime, drafting: FittedStepTime) -> None:
        self._length = length  # tokens that are drafted
        self._plain, self._drafting = plain, drafting  # times of steps at whose end nothing is drafted, and of others
        self._tried, self._held = np.full(length, PRIOR_WEIGHT), np.full(length, PRIOR_WEIGHT * PRIOR)
        self._cases: dict[int, _Case] = {}

    @property
    def chances(self) -> np.ndarray:  # [length]: that so many drafts hold
        chances: np.ndarray = np.cumprod(self._held / self._tried)
        return chances

    def rests(self, rows: int) -> bool:
        """Whether nothing is verified in a step of so many rows for a long while yet, counting this one: then nobody
        need look at it.
        """
        case = self._cases.get(rows.bit_length())
        if case is None or case.resting <= SETTLE:  # the last ones are timed
            return False
        case.turn += 1
        case.resting -= 1
        return True

    def turn(self, rows: int, most: int) -> int:
        """How many drafts each row verifies in a step of so many rows, and at most so many tokens; 0: none."""
        case = self._cases.setdefault(rows.bit_length(), _Case())
        case.turn += 1
        if case.resting:
            case.resting -= 1
            case.trying = case.trying if case.resting else SETTLE
            return 0
        room = min(self._length, most // rows - 1)
        if room < 1:
            return 0
        if case.trying or not self._drafting.knows_decoding:
            case.trying = max(0, case.trying - 1)
            return room
        best = self._best(rows, room)
        if not best:
            case.resting, case.pause = case.pause, min(2 * case.pause, LONGEST_PAUSE)
        elif case.turn % TURNS == 0:
            case.resting, case.pause = PLAIN_TURNS, FIRST_PAUSE
        return best

    def count(self, verified: Sequence[int], held: Sequence[int]) -> None:
        """Of rows: drafts that were verified, and how many of them held."""
        for depth in range(self._length):
            going = [after for count, after in zip(verified, held) if count > depth and after >= depth]
            self._tried[depth] += len(going)
            self._held[depth] += sum(after > depth for after in going)
        if self._tried[0] > MOST_COUNTED:
            self._tried *= 0.5
            self._held *= 0.5

    def _best(self, rows: int, room: int) -> int:
        """The number of drafts from which most tokens per second are to be expected."""
        lengths = np.array(sorted({room, *(length for length in LENGTHS if length < room)}))
        expected = (1 + np.cumsum(self.chances))[lengths - 1]
        rate = expected / self._drafting.decoding(rows * (1 + lengths))
        best = int(np.argmax(rate))
        without = 1 / float(self._plain.decoding(np.array([rows]))[0])
        return int(lengths[best]) if rate[best] > WORTHWHILE * without else 0
