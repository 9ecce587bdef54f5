"""Foresight: whether to bring experts that the next layer is likely to choose, by what that has cost and spared."""

from __future__ import annotations

WINDOW = 1024  # calls after which the costs of one way are looked at
RETRY = 8  # every so many windows the way that is not taken has a turn
GAIN = 0.95  # what is foreseen has to cost at most so much of what plain least recently used does


class Foresight:
    """Both ways take turns at first; then the better one runs, and the other one is tried again now and then."""

    def __init__(self, fixed: bool | None = None) -> None:
        """fixed: whether, whatever it costs; None: if it pays."""
        self._fixed = fixed
        self.on = bool(fixed)
        self.costs: dict[bool, float] = {}  # of a call: of the last windows of either way
        self._windows, self._since, self._cost = 0, 0, 0.0

    def note(self, call: int, cost: float) -> bool:
        """How much all calls up to this one have cost, in whatever unit; returns whether the next ones foresee."""
        if self._fixed is not None or call - self._since < WINDOW:
            return self.on
        now = (cost - self._cost) / (call - self._since)
        before = self.costs.get(self.on)
        self.costs[self.on] = now if before is None else (before + now) / 2
        self._since, self._cost = call, cost
        self._windows += 1
        if len(self.costs) < 2:
            self.on = not self.on
        else:
            pays = self.costs[True] < GAIN * self.costs[False]
            self.on = pays != (self._windows % RETRY == 0)
        return self.on
