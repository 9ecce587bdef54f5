"""Batching: who may enter and leave between steps, and what is computed again. Continuous, and the ways before it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from tokenmill.engine.request import Finish, Request, Wait

ALWAYS = sys.maxsize  # a step number that never comes: all results until then are dropped


class Batching:
    """Continuous: anybody enters and leaves at every step.

    Without a KV cache a request's keys and values are only good for the step that made them: it starts at its first
    token again for every token.
    """

    def __init__(self, *, kv_cache: bool = True) -> None:
        self.recomputed = 0  # tokens that were computed before
        self.may_share = kv_cache  # whether blocks, once written, stay as they are, so that others may read them
        self.is_continuous = kv_cache and type(self) is Batching  # nothing below has anything to say
        self.done: dict[str, tuple[Request, Finish]] = {}  # have their last token, and stay until their batch ends
        self._kv_cache = kv_cache
        self._rewound: dict[str, int] = {}  # id -> length for which it was sent back to its first token

    def admits(self, request: Request, running: Sequence[Request], now: float) -> bool:
        """Whether a request that fits may enter."""
        return True

    def keeps(self, request: Request, why: Finish) -> bool:
        """Whether a request that has its last token stays until its batch ends."""
        return False

    def turn(self, running: Sequence[Request]) -> Iterable[tuple[Request, Finish]]:
        """Called before each step: sends requests back to what they compute again; returns those that leave now."""
        if not self._kv_cache:
            before, self._rewound = self._rewound, {}
            for request in running:
                # Once per token: a chunk on the way to it may happen to leave a single token, too.
                if before.get(request.id) == request.num_tokens or self._rewind(request, request.num_computed):
                    self._rewound[request.id] = request.num_tokens
        return ()

    def _rewind(self, request: Request, tokens: int) -> int:
        """Have a request that would decode compute up to `tokens` before that again; returns how many."""
        if request.beams is not None:  # a fork starts where its parent is
            return 0
        # Launched proposals count as computed, more of them than there are tokens.
        ready = request.num_tokens - request.num_computed <= 1 and request.num_computed >= request.prompt_len
        if not ready:
            return 0
        request.waits_for = Wait.COMMIT if request.in_flight else None
        if request.waits_for is not None:
            return 0
        back = min(tokens, request.num_computed)
        request.num_computed -= back
        request.drafts = []
        self.recomputed += back
        return back


class Dynamic(Batching):
    """What waits when the last batch has ended is the next batch; who comes within the window still gets in."""

    def __init__(self, *, kv_cache: bool = True, window: float = 0.01) -> None:
        super().__init__(kv_cache=kv_cache)
        self._window = window  # seconds
        self._until = 0.0
        self._members: set[str] = set()
        self._closed = False

    def admits(self, request: Request, running: Sequence[Request], now: float) -> bool:
        if not running:
            self._members, self._closed, self._until = set(), False, now + self._window
        if request.id in self._members:  # preempted, and back
            return True
        if self._closed or len(running) < len(self._members) or request.arrival > self._until:
            return False
        self._members.add(request.id)
        return True


class Static(Dynamic):
    """The batch of a rectangular tensor: nobody leaves before all are done, and all are as long as the longest.

    What padding costs is really computed, with tokens that are there: a row that is done computes its last token again
    in every step; a prompt that is shorter than the longest computes as many tokens again as it lacks, once all prompts
    are read. Results of these are dropped. Not imitated: attention to padding keys.
    """

    def __init__(self, *, kv_cache: bool = True, window: float = 0.01) -> None:
        super().__init__(kv_cache=kv_cache, window=window)
        self.may_share = False
        self._lacking: dict[str, int] = {}  # id -> tokens of padding still to be computed

    def keeps(self, request: Request, why: Finish) -> bool:
        if request.grammar is not None or request.beams is not None:
            return False
        self.done[request.id] = request, why
        request.void_until = ALWAYS
        return True

    def turn(self, running: Sequence[Request]) -> Iterable[tuple[Request, Finish]]:
        if all(request.id in self.done for request in running):
            left, self.done = self.done, {}
            return left.values()
        if not self._closed and all(request.num_output for request in running):
            self._closed = True
            longest = max(request.prompt_len for request in running)
            self._lacking = {request.id: longest - request.prompt_len for request in running}
        for request in running:
            if request.id in self.done:
                request.waits_for, request.drafts = Wait.COMMIT if request.in_flight else None, []  # as in _rewind
                again = request.waits_for is None and request.num_computed >= len(request.tokens)
                if again:  # else it was preempted and is back
                    request.num_computed = len(request.tokens) - 1
                    self.recomputed += 1
            elif lacks := self._lacking.get(request.id):
                self._lacking[request.id] = lacks - self._rewind(request, lacks)
        return super().turn([request for request in running if request.id not in self.done])


BATCHING: dict[str, type[Batching]] = {"continuous": Batching, "dynamic": Dynamic, "static": Static}
