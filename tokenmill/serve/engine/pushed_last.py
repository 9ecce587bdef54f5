"""PushedLast: the last word of a request that another engine waits for is held back until its blocks are there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tokenmill.engine.core import Engine
from tokenmill.engine.scheduler import Delta
from tokenmill.kv.transfers import Transfers

LONGEST = 10.0  # seconds that somebody waits for blocks: what has not arrived by then is computed again
LOOK = 0.02  # seconds between two looks, where nothing else is to be done


@dataclass
class _Held:
    delta: Delta
    until: float


class PushedLast:
    """Costs nothing where no request pushes."""

    def __init__(self, transfers: Transfers | None) -> None:
        self._transfers = transfers
        self.held: list[_Held] = []

    def hold_back(self, deltas: list[Delta]) -> list[Delta]:
        """Those that may be told now, of earlier steps included."""
        transfers = self._transfers
        if transfers is None:
            return deltas
        last = [one for one in deltas if one.finished and one.request.pushes]
        if not (last or self.held):
            return deltas
        now = time.monotonic()
        told = [one for one in deltas if one not in last]
        self.held += [_Held(one, now + LONGEST) for one in last]
        waiting = [one for one in self.held if now < one.until and transfers.writing(one.delta.request.identities)]
        told += [one.delta for one in self.held if one not in waiting]
        self.held = waiting
        return told

    def wait(self, engine: Engine) -> None:
        """For a copy to end, when the engine has nothing to do."""
        assert self._transfers is not None
        self._transfers.wait(LOOK)
        engine.scheduler.take_in_transfers()
