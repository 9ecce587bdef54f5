"""Tenants: who asks, how much they may ask for, and what keeps their prefix cache to themselves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.errors import InvalidRequest
from tokenmill.processor import PRIORITIES
from tokenmill.serve.errors import HttpError

BUSY_RETRY = 1.0  # seconds; a tenant at its concurrency limit cannot be told when one of its requests will end
LONGEST_SALT = 1024  # characters


@dataclass(frozen=True)
class TenantLimits:
    """None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # prompt and output
    concurrency: int | None = None
    priority: str = "realtime"  # the most urgent class that may be asked for
    adapters: tuple[str, ...] | None = None  # LoRA adapters that it may name
    operator: bool = False  # runs the server: sees what each tenant uses (/metrics) and has running (/live)


class TokenBucket:
    """So many per minute, at most a minute's worth at once. May go below zero for what was not known beforehand."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = per_minute or 0.0
        self._seen = clock()

    def wait(self, amount: float) -> float:
        """Seconds until `amount` may be taken; 0: now."""
        if self.per_minute is None:
            return 0.0
        self._fill(self.per_minute)
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        if self.per_minute is not None:
            self._fill(self.per_minute)
            self._level -= amount

    def _fill(self, per_minute: float) -> None:
        now = self._clock()
        self._level = min(per_minute, self._level + (now - self._seen) * per_minute / 60)
        self._seen = now


class Tenant:
    def __init__(
        self,
        name: str,
        limits: TenantLimits | None = None,
        salted: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.limits = limits or TenantLimits()
        self.running = 0
        self.open_requests: set[str] = set()  # ids of the requests that are open
        self._salted = salted
        self._requests = TokenBucket(self.limits.requests_per_minute, clock)
        self._tokens = TokenBucket(self.limits.tokens_per_minute, clock)

    def enter(self) -> None:
        """Begin a request. Raises HttpError 429; who enters must leave."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if (wait := bucket.wait(1)) > 0:
                why = f"{bucket.per_minute:g} {what} per minute are allowed; try again in {wait:.1f} s"
                raise HttpError(429, why, "rate_limit_exceeded", retry_after=wait)
        if self.limits.concurrency is not None and self.running >= self.limits.concurrency:
            raise HttpError(
                429,
                f"{self.running} of your requests are running and {self.limits.concurrency} are allowed; "
                "wait until one has ended",
                "concurrency_limit_exceeded",
                retry_after=BUSY_RETRY,
            )
        self._requests.take(1)
        self.running += 1

    def may_use(self, adapter: str) -> bool:
        return self.limits.adapters is None or adapter in self.limits.adapters

    def leave(self, tokens: int) -> None:
        """The request has ended, and this is what it used."""
        self.running -= 1
        self._tokens.take(tokens)

    def salt(self, asked: str | None) -> str:
        """The prefix-cache salt: another tenant's requests can never have the same, whatever they ask for."""
        if asked is not None and len(asked) > LONGEST_SALT:
            raise InvalidRequest(f"cache_salt has {len(asked)} characters; at most {LONGEST_SALT}")
        if not self._salted:
            return asked or ""
        parts = [self.name.encode(), (asked or "").encode()]
        return hashlib.blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()

    def priority(self, asked: str | int | None) -> str | int:
        """The class of a request. Raises HttpError for one that this tenant may not have."""
        most = PRIORITIES[self.limits.priority]
        if asked is None:
            return max(most, PRIORITIES["api"])
        if (PRIORITIES.get(asked, most) if isinstance(asked, str) else asked) < most:
            raise HttpError(
                403,
                f"priority is {asked!r} and your key allows {self.limits.priority} at most",
                "priority_not_allowed",
                "priority",
            )
        return asked
