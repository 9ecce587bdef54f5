"""StepSeconds: how long a step takes, as a linear model that is fitted to the steps as they come."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.engine.step import Facts

FORGETTING = 0.998  # it remembers some hundreds of steps
LEAST_SEEN = 8  # steps before anything is predicted


class StepSeconds:
    """Recursive least squares over (1, decode rows, their context, prompt tokens, pairs that these look at)."""

    def __init__(self) -> None:
        self._units = np.array([1.0, 1e-1, 1e-4, 1e-2, 1e-6])  # they make the prices alike in size
        self._prices = np.zeros(5)
        self._spread = np.eye(5) * 1e2
        self._seen = 0

    @property
    def known(self) -> bool:
        return self._seen >= LEAST_SEEN

    @property
    def prices(self) -> list[float]:
        """Seconds for each of the five. Where some hardly vary only their sum is known, and that is right."""
        prices: list[float] = (self._prices * self._units).tolist()
        return prices

    def learn(self, facts: Facts, seconds: float) -> None:
        scaled: npt.NDArray[np.float64] = np.array([1, *facts], dtype=np.float64) * self._units
        miss = seconds - scaled @ self._prices
        self._seen += 1
        gain = self._spread @ scaled / (FORGETTING + scaled @ self._spread @ scaled)
        self._prices = self._prices + gain * miss
        self._spread = (self._spread - np.outer(gain, scaled @ self._spread)) / FORGETTING
        largest = float(np.trace(self._spread))
        if largest > 1e6:  # what does not vary for long must not be forgotten without end
            self._spread *= 1e6 / largest
