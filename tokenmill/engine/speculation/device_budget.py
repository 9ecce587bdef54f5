"""DeviceBudget: how many of the tokens that a device drafted every row verifies, or its tree, judged by the clock.

To weigh drafts row by row takes the host longer than a small model's step takes a GPU. So all rows verify the same
number, and what steps with and without drafts took decides which: that has in it whatever the host does for them, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenmill.engine.speculation.budget import WORTHWHILE
from tokenmill.engine.step import NODES
from tokenmill.step_time import FittedStepTime

LENGTHS = (1, 2, 4)  # drafts per row, for which steps are recorded (runner/recordings.py)
SETTLE = 4  # steps without drafts, then with chains, then with trees, that a number of rows begins with
FIRST_PAUSE, LONGEST_PAUSE = 256, 16384  # steps without drafts before they are tried again, where they do not pay
TURNS, PLAIN_TURNS = 1024, 4  # of so many steps that many are plain where drafts pay: what they are compared with
OTHER_TURNS, OTHERS = 64, 3  # of so many that many verify what is not best, trees or chains: neither is known for long
PRIOR, TREE_PRIOR, PRIOR_WEIGHT = 0.5, 0.6, 6.0  # of drafts that hold, before any were counted
MOST_COUNTED = 1000.0  # drafts; older ones fade


class _Case:
    """Of a number of rows."""

    __slots__ = ("pause", "resting", "trying", "turn")

    def __init__(self, tries: int) -> None:
        self.turn = 0
        self.trying = tries  # steps that verify drafts, whatever is known; trees at last
        self.resting, self.pause = SETTLE, FIRST_PAUSE  # steps that verify none


class DeviceBudget:
    """Chances are those of all requests: a device drafts for all of them alike."""

    def __init__(
        self, length: int, plain: FittedStepTime, drafting: FittedStepTime, trees: FittedStepTime | None = None
    ) -> None:
        self._length = length  # tokens that are drafted
        self._plain, self._drafting = plain, drafting  # times of steps at whose end nothing is drafted, and of others
        self._trees = trees  # and of those that verify and draft trees
        self._tries = SETTLE if trees is None else 2 * SETTLE
        self._chain, self._tree = _Chances(length, PRIOR), _Chances(length, TREE_PRIOR)
        self._cases: dict[int, _Case] = {}
        self.tree = False  # whether it is a tree that the step of the last turn verifies

    @property
    def chances(self) -> np.ndarray:  # [length]: that so many drafts of a chain hold
        return self._chain.all

    @property
    def expects(self) -> float:
        """Drafts that hold of what all rows verify, as of the last turn."""
        return float((self._tree if self.tree else self._chain).all.sum())

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

    def turn(self, rows: int, most: int, branches: bool = False) -> int:
        """How many drafts each row verifies in a step of so many rows, and at most so many tokens; 0: none.

        branches: it may be a tree, which as many drafts of may hold (`tree`).
        """
        self.tree = False
        case = self._cases.setdefault(rows.bit_length(), _Case(self._tries))
        case.turn += 1
        if case.resting:
            case.resting -= 1
            case.trying = case.trying if case.resting else self._tries
            return 0
        room = min(self._length, most // rows - 1)
        if room < 1:
            return 0
        branches = branches and self._trees is not None and rows * (1 + NODES) <= most
        if case.trying or not self._drafting.knows_decoding:
            self.tree = branches and 0 < case.trying <= SETTLE
            case.trying = max(0, case.trying - 1)
            return room
        best = self._best(rows, room, branches)
        if not best:
            case.resting, case.pause = case.pause, min(2 * case.pause, LONGEST_PAUSE)
        elif case.turn % TURNS == 0:
            case.resting, case.pause = PLAIN_TURNS, FIRST_PAUSE
        elif branches and case.turn % OTHER_TURNS < OTHERS:
            self.tree = not self.tree
            return room
        return best

    def count(self, verified: Sequence[int], held: Sequence[int]) -> None:
        """Of rows: drafts of chains that were verified, and how many of them held."""
        self._chain.count(verified, held)

    def count_trees(self, held: Sequence[int]) -> None:
        """Of rows that verified trees: how deep the path was that held."""
        self._tree.count([self._length] * len(held), held)

    def _best(self, rows: int, room: int, branches: bool) -> int:
        """The number of drafts from which most tokens per second are to be expected, as chains or as a tree."""
        lengths = np.array(sorted({room, *(length for length in LENGTHS if length < room)}))
        expected = (1 + np.cumsum(self.chances))[lengths - 1]
        rate = expected / self._drafting.decoding(rows * (1 + lengths))
        best = int(np.argmax(rate))
        length, highest = int(lengths[best]), float(rate[best])
        if branches and self._trees is not None and self._trees.knows_decoding:
            with_trees = (1 + self._tree.all.sum()) / float(self._trees.decoding(np.array([rows * (1 + NODES)]))[0])
            if with_trees > highest:
                self.tree, length, highest = True, self._length, with_trees
        without = 1 / float(self._plain.decoding(np.array([rows]))[0])
        if highest > WORTHWHILE * without:
            return length
        self.tree = False
        return 0


class _Chances:
    """Of drafts to hold, by how far they are from what is known."""

    def __init__(self, length: int, prior: float) -> None:
        self._tried, self._held = np.full(length, PRIOR_WEIGHT), np.full(length, PRIOR_WEIGHT * prior)

    @property
    def all(self) -> np.ndarray:  # [length]: that so many hold
        chances: np.ndarray = np.cumprod(self._held / self._tried)
        return chances

    def count(self, verified: Sequence[int], held: Sequence[int]) -> None:
        for depth in range(len(self._tried)):
            going = [after for count, after in zip(verified, held) if count > depth and after >= depth]
            self._tried[depth] += len(going)
            self._held[depth] += sum(after > depth for after in going)
        if self._tried[0] > MOST_COUNTED:
            self._tried *= 0.5
            self._held *= 0.5
