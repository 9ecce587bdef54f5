"""Trial: whether drafts make answers faster at so many rows, measured on this machine with and without, in turns."""

from __future__ import annotations

SETTLE = 2  # steps after a change that are not counted: they were launched before it
WINDOW = 12  # steps of a trial
FIRST = 4  # steps without drafts that are measured at the beginning
HOPELESS = 3  # steps after which a trial ends that is far behind
FAR, BEHIND = 0.7, 0.99  # shares of the other rate
FIRST_PAUSE, LONGEST_PAUSE = 48, 1536  # steps between two trials of what was slower
MEMORY = 0.1  # of a rate, per step


class _Arm:
    """Tokens per second in one of the two ways."""

    __slots__ = ("rate", "steps")

    def __init__(self) -> None:
        self.rate = 0.0
        self.steps = 0  # in this trial

    def learn(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        weight = max(MEMORY, 1 / self.steps)
        # Of times, not of rates: what counts is how long all the tokens took together.
        slowness = seconds / max(tokens, 1e-9)
        self.rate = 1 / ((1 - weight) / self.rate + weight * slowness) if self.rate else 1 / max(slowness, 1e-9)


class _Case:
    """One number of rows."""

    __slots__ = ("arms", "left", "on", "pause", "settling")

    def __init__(self) -> None:
        self.arms = {False: _Arm(), True: _Arm()}
        self.on = False  # it begins without drafts: what these have to beat is known after a few steps
        self.settling, self.left, self.pause = SETTLE, FIRST, FIRST_PAUSE


class Trial:
    """Everything that drafts cost is in what is measured, also on the host, so they never slow anything for long.

    While drafts are on they are watched all the time; while they are off they are tried again after a pause, which
    doubles each time that they lose.
    """

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def on(self, rows: int) -> bool:
        return self._case(rows).on

    def learn(self, rows: int, tokens: int, seconds: float, on: bool) -> None:
        """A step of so many rows that decode brought so many tokens."""
        case = self._case(rows)
        if on != case.on:
            return
        if case.settling:
            case.settling -= 1
            return
        mine, other = case.arms[on], case.arms[not on]
        mine.learn(tokens, seconds)
        case.left -= 1
        if on and other.rate:
            loses = mine.rate < BEHIND * other.rate and (case.left <= 0 or mine.rate < FAR * other.rate)
            if loses and mine.steps >= HOPELESS:
                self._change(case, pause=min(2 * case.pause, LONGEST_PAUSE))
            elif case.left <= 0:
                case.pause = FIRST_PAUSE
        elif not on and case.left <= 0:
            self._change(case, pause=case.pause)

    def _case(self, rows: int) -> _Case:
        return self._cases.setdefault(rows.bit_length(), _Case())

    def _change(self, case: _Case, pause: int) -> None:
        case.on = not case.on
        case.pause = pause
        case.settling, case.left = SETTLE, WINDOW if case.on else pause
        case.arms[case.on].steps = 0
        if case.on:
            case.arms[True].rate = 0.0  # what is drafted now may be another kind of text
