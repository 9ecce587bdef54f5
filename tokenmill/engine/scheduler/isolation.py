"""Isolation: finds the request that breaks steps. Whoever was in too many failed ones is tried alone, then given up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tokenmill.engine.request import Request

MAX_FAILURES = 2  # after this many failed steps a request is tried alone
MAX_FAILURES_ALONE = 2  # and after this many failures alone it is given up


@dataclass
class _Case:
    failures: int = 0
    failed_at: int = 0  # how far it had come when a step with it failed
    alone: bool = False  # runs without company until past failed_at


class Isolation:
    """Most requests never fail and have no case here."""

    def __init__(self) -> None:
        self.suspects: deque[Request] = deque()  # they run alone, one after the other
        self._cases: dict[str, _Case] = {}

    @property
    def is_quiet(self) -> bool:
        return not self._cases

    def is_suspect(self, request: Request) -> bool:
        case = self._cases.get(request.id)
        return case is not None and case.alone

    def failures(self, request: Request) -> int:
        case = self._cases.get(request.id)
        return 0 if case is None else case.failures

    def failed(self, request: Request, in_company: bool) -> bool:
        """A step with it failed. Whether it is to be given up: tried in company, then alone, it failed each time.

        A suspect is judged by the steps that it had to itself, and by no others.
        """
        case = self._cases.setdefault(request.id, _Case())
        case.failed_at = max(case.failed_at, len(request.tokens))
        if case.alone and in_company:
            return False
        case.failures += 1
        if case.alone:
            return case.failures >= MAX_FAILURES + MAX_FAILURES_ALONE
        if case.failures >= MAX_FAILURES:
            case.failures = MAX_FAILURES
            case.alone = True
            self.suspects.append(request)
        return False

    def seen_working(self, request: Request, position: int) -> bool:
        """It was computed up to `position` without a failure. Whether it was a suspect and is none any more."""
        case = self._cases.get(request.id)
        if case is None or position < case.failed_at:
            return False
        self.forget(request)
        return case.alone

    def noted(self, request: Request) -> None:
        """It was in a failed step, but that is no fault of its own."""
        case = self._cases.setdefault(request.id, _Case())
        case.failed_at = max(case.failed_at, len(request.tokens))

    def forget(self, request: Request) -> None:
        case = self._cases.pop(request.id, None)
        if case is not None and case.alone:
            self.suspects.remove(request)
