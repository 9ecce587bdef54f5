"""Standstill: whether ranks that finish no step still compute, or hang."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_SHARE = 0.1  # of a core: who waits for another rank looks for it now and then, and that is far less


class Standstill:
    """Told every now and then how far ranks are, and how much processor time each of those took that are not done."""

    def __init__(self, patience: float, busy_patience: float) -> None:
        """patience: seconds in which none of them computes; busy_patience: in which none gets on, whatever it does."""
        self.patience, self._busy_patience = patience, busy_patience
        self._idle = self.seconds = 0.0  # since somebody computed, and since somebody got on
        self._seen: object = None
        self._computed: Mapping[int, float | None] = {}

    def look(self, seen: object, passed: float, computed: Mapping[int, float | None]) -> bool:
        """Whether they hang. `seen` changes when somebody gets on; `passed` seconds after the look before. `computed`:
        processor seconds by rank, None where that cannot be known.
        """
        before, self._computed = self._computed, computed
        if seen != self._seen:
            self._seen, self._idle, self.seconds = seen, 0.0, 0.0
            return False
        self.seconds += passed
        works = any(_share(before.get(rank), now, passed) >= LEAST_SHARE for rank, now in computed.items())
        self._idle = 0.0 if works else self._idle + passed
        return self._idle >= self.patience or self.seconds >= self._busy_patience


def _share(before: float | None, now: float | None, passed: float) -> float:
    return 1.0 if before is None or now is None else (now - before) / passed
