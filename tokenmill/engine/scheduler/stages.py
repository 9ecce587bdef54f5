"""Sets: deals requests into disjoint steps of about equal work, one for every stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.engine.request import Request

LEAST_CHUNK = 64  # prompt tokens that a step may always have: fewer would not fill a product of matrices
PARTS = 2  # steps per stage that unread prompts are dealt into: the more, the shorter a pipeline fills and drains


class Sets:
    """With `stages` steps in flight, each has requests of its own, and whoever was committed joins the next step.

    A request is out of the deal while a token that it needs is on its way. Chunks of a prompt are no such case: every
    stage computes steps in their order, so a chunk finds there what the one before it left.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self._free = stages  # steps that may be launched before one is committed

    def open(self, in_flight: int) -> None:
        """A step is being composed, beside so many."""
        self._free = max(1, self.stages - in_flight)

    def ready(self, running: Sequence[Request]) -> list[Request]:
        """Who may be in the next step, the most important first.

        Those who decode share the steps that are still free, and no step takes more than its share of all, so that
        sets of unequal size become equal as they come back. Whoever was in none for longest goes first.
        """
        if self.stages == 1:
            return list(running)
        here = [one for one in running if not one.pending]
        decoding = [one for one in here if 0 < one.work() <= 1 + one.num_drafts]
        of_all = len(decoding) + len(running) - len(here)
        most = min(-(-len(decoding) // self._free), -(-of_all // self.stages))
        if most >= len(decoding):
            return here
        later = set(sorted(decoding, key=_last_step)[most:])
        return [one for one in here if one not in later]

    def prompt_tokens(self, unread: int) -> int:
        """How many of so many a step may have."""
        return max(LEAST_CHUNK, -(-unread // (PARTS * self.stages)))


def _last_step(request: Request) -> int:
    return request.last_step
