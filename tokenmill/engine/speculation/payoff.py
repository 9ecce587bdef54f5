"""Payoff: whether drafts make answers faster at so many rows, by what they brought and by all that they cost."""

from __future__ import annotations

WINDOW = 4  # steps after which drafts are judged,
TOKENS = 12  # and so many more where a step has few rows, and tells little
HOPELESS, FAR = 3, 0.7  # after so few steps they are judged, too, where they bring less than this share
LEAST = 0.99  # tokens per second, in shares of those without drafts
FIRST_PAUSE, LONGEST_PAUSE = 48, 1536  # steps before they are tried again
MEMORY = 0.05  # of what was seen, per step


class _Case:
    """One number of rows."""

    __slots__ = ("brought", "cost", "pause", "resting", "steps")

    def __init__(self) -> None:
        self.brought = self.cost = 1.0  # tokens and time of a step with drafts, in shares of one without
        self.steps = 0  # since they were switched on
        self.resting, self.pause = 0, FIRST_PAUSE


class Payoff:
    """Drafts are watched while they are on; where they lose they are off for a while, which doubles each time.

    What a step without drafts would have taken comes from the model of step times, which follows every step: to compare
    with steps of another moment would be to compare moments, on a machine that others use, too.
    """

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def on(self, rows: int) -> bool:
        return not self._case(rows).resting

    def rested(self, rows: int) -> None:
        """A step of so many rows ran without drafts."""
        case = self._case(rows)
        case.resting = max(0, case.resting - 1)

    def learn(self, rows: int, brought: float, cost: float) -> None:
        """A step with drafts brought so many times the tokens of one without, and took so many times its time."""
        case = self._case(rows)
        if case.resting:
            return
        case.steps += 1
        weight = max(MEMORY, 1 / case.steps)
        case.brought += weight * (brought - case.brought)
        case.cost += weight * (cost - case.cost)
        gain = case.brought / case.cost
        window = WINDOW + TOKENS // rows
        if gain < LEAST and (case.steps >= window or (case.steps >= HOPELESS and gain < FAR)):
            case.resting, case.pause = case.pause, min(2 * case.pause, LONGEST_PAUSE)
            case.steps = 0
        elif case.steps == 4 * window:
            case.pause = FIRST_PAUSE

    def _case(self, rows: int) -> _Case:
        return self._cases.setdefault(rows.bit_length(), _Case())
