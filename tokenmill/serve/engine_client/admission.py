"""AdmissionControl: who may come in, judged by what waits, how fast it drains, and how the engine fares."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.errors import QueueFull, TokenmillError
from tokenmill.serve.settings import ServeSettings
from tokenmill.step_time import Facts, FittedStepTime

RETRY_LEAST, RETRY_MOST = 1.0, 120.0  # seconds that a refused client is told to wait
_FORGETTING = 0.995  # per step: what was measured a few hundred steps ago hardly counts
_RECENT = 64  # prompts: what the prefix cache spared one of these it may spare the next one, too


class Overloaded(QueueFull):
    """There is no room, or not enough time before the deadline; a later attempt may find some (HTTP 429)."""

    def __init__(self, message: str, retry_after: float, code: str = "overloaded") -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after  # seconds


class Unavailable(TokenmillError):
    """The engine fails repeatedly, or the server is going away (HTTP 503)."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


@dataclass(frozen=True)
class Backlog:
    """What was accepted and is not finished."""

    queued_tokens: int = 0  # prompts that no engine has begun
    output_tokens: float = 0.0  # that running and queued requests will still say, as far as one can tell
    rows: int = 1  # that would run at once


class AdmissionControl:
    """The bounded queue: refuses with the time after which there should be room."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.max_step_tokens = 1  # of the engine, once there is one
        self.step_time = FittedStepTime(forgetting=_FORGETTING)
        self._answer = 64.0  # tokens of a typical answer, learned
        self._context = 0.0  # tokens that one of a prompt attends to, learned
        self._uncached: deque[float] = deque(maxlen=_RECENT)  # of recent prompts: the share that was computed

    def learn_step(self, facts: Facts, seconds: float) -> None:
        if facts.tokens:
            self.step_time.learn(facts, seconds)
        if facts.prefill_tokens:
            self._context += 0.05 * (facts.prefill_pairs / facts.prefill_tokens - self._context)

    def learn_answer(self, tokens: int) -> None:
        self._answer += 0.05 * (tokens - self._answer)

    def learn_prompt(self, tokens: int, cached: int) -> None:
        self._uncached.append(1 - cached / tokens)

    def expected_output(self, said: int, max_tokens: int) -> float:
        """Tokens that a sequence will still say: an answer that outgrew the typical one is taken to double."""
        return min(max_tokens - said, max(self._answer - said, said * 0.5, 1.0))

    def drain_seconds(self, load: Backlog) -> float | None:
        """Predicted time to finish everything accepted; None: nothing measured yet."""
        steps = load.output_tokens / max(1, load.rows) + math.ceil(load.queued_tokens / self.max_step_tokens)
        return self._seconds(steps, load.output_tokens, load.queued_tokens, self._context)

    def prefill_seconds(self, tokens: int) -> float | None:
        """The least time to compute these prompt tokens: as if nothing stood before any of them. None: nothing measured
        yet."""
        return self._seconds(math.ceil(tokens / self.max_step_tokens), 0, tokens, 0.0)

    def uncached_tokens(self, tokens: int) -> int:
        """How many of these tokens of prompts will have to be computed, at least. Nobody knows before the engine looks
        what its prefix cache holds of them, so it is taken to be as much as of the luckiest of recent prompts."""
        return math.ceil(tokens * min(self._uncached, default=1.0))

    def _seconds(self, steps: float, decodes: float, prefill_tokens: float, context: float) -> float | None:
        """Of so many steps that do this together; None: nothing measured yet."""
        if not self.step_time.known:
            return None
        if not steps:
            return 0.0
        prompts = prefill_tokens / steps
        facts = Facts(decodes / steps, prefill_tokens=prompts, prefill_pairs=prompts * context)
        return steps * self.step_time.seconds(facts)

    def check(
        self,
        queued: int,
        queued_tokens: int,
        tokens: int,
        sequences: int,
        load: Callable[[], Backlog],
    ) -> None:
        """Raise Overloaded if there is no room for a request of `tokens` prompt tokens; only then `load` is asked."""
        limit, most = self._settings.max_queued_tokens, self._settings.max_queued_requests
        if queued and queued + sequences > most:
            raise Overloaded(
                f"{queued} requests are waiting, the limit is {most}; try again later",
                self.retry_after(load(), (queued + sequences - most) / queued),
            )
        if queued and queued_tokens + tokens > limit:
            raise Overloaded(
                f"{queued_tokens} prompt tokens are waiting and this request has {tokens}, the limit is {limit}; "
                "try again later",
                self.retry_after(load(), (queued_tokens + tokens - limit) / max(1, queued_tokens)),
            )

    def check_deadline(self, ahead: int, tokens: int, timeout: float, load: Callable[[], Backlog]) -> None:
        """Raise Overloaded if a request whose prompt is read after `ahead` others' tokens cannot begin to answer in
        time."""
        least = self.prefill_seconds(self.uncached_tokens(ahead + tokens))
        if least is not None and least > timeout:
            raise Overloaded(
                f"the deadline is {timeout:.3g} s away but the first token would take {least:.3g} s or more; "
                "try again later, or allow more time",
                self.retry_after(load(), 1.0),
                "deadline_too_close",
            )

    def retry_after(self, load: Backlog, share: float) -> float:
        """Seconds until this share of what is accepted is done."""
        drain = self.drain_seconds(load)
        return RETRY_LEAST if drain is None else min(max(drain * min(share, 1.0), RETRY_LEAST), RETRY_MOST)


class CircuitBreaker:
    """Opens when engines fail repeatedly; lets one request in after a while; closes when an engine does its work."""

    def __init__(self, settings: ServeSettings) -> None:
        self._failures: deque[float] = deque()
        self._settings = settings
        self._opened: float | None = None
        self._probing = False

    def failed(self, now: float) -> bool:
        """Returns whether this failure opened it."""
        self._failures.append(now)
        while self._failures and now - self._failures[0] > self._settings.breaker_window:
            self._failures.popleft()
        was_open = self._opened is not None
        if was_open or len(self._failures) >= self._settings.breaker_failures:
            self._opened, self._probing = now, False
        return self._opened is not None and not was_open

    def succeeded(self, now: float) -> bool:
        """A request was answered. Returns whether that closed it; before its time is up it stays open."""
        if self.state(now) != "half_open":
            return False
        self._opened, self._probing = None, False
        self._failures.clear()
        return True

    def state(self, now: float) -> str:
        """closed, open or half_open."""
        if self._opened is None:
            return "closed"
        return "open" if now - self._opened < self._settings.breaker_seconds else "half_open"

    def admit(self, now: float) -> float | None:
        """None: come in. Else the seconds to wait. Half-open, the first comer is the probe."""
        state = self.state(now)
        if state == "closed":
            return None
        if state == "half_open" and not self._probing:
            self._probing = True
            return None
        assert self._opened is not None
        return max(RETRY_LEAST, self._opened + self._settings.breaker_seconds - now)

    def probe_ended(self) -> None:
        """The request that was let in ended without an answer: another may try."""
        self._probing = False
