"""Isolation: finds the request that breaks steps, or engines. Whoever was in too many failures is tried alone, then
given up. The scheduler asks it about steps, and a server's front about engine processes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tokenmill.engine.request import Request

MAX_FAILURES = 2  # after this many failed steps a request is tried alone
MAX_FAILURES_ALONE = 2  # and after this many failures alone it is given up
# How much of a failure it is when a rank is lost: three crashes in a row are as two failed steps, or four kills from
# outside, of which the system may have made some for want of memory. Between steps it has to do with no request.
RANK_CRASHED, RANK_KILLED, RANK_LOST_IDLE = 0.75, 0.5, 0.0


@dataclass
class _Case:
    failures: float = 0  # by their weight
    times: int = 0
    failed_at: int = 0  # how far it had come when a step with it failed
    alone: bool = False  # runs without company until past failed_at


class Isolation:
    """Most requests never fail and have no case here.

    After `most` failures a request is tried alone, and after `most_alone` more it is given up.
    """

    def __init__(self, most: float = MAX_FAILURES, most_alone: float = MAX_FAILURES_ALONE) -> None:
        self._most, self._most_alone = most, most_alone
        self.suspects: deque[Request] = deque()  # they run alone, one after the other
        self.cases: dict[str, _Case] = {}  # by request id

    def is_suspect(self, request: Request) -> bool:
        case = self.cases.get(request.id)
        return case is not None and case.alone

    def failures(self, request: Request) -> int:
        case = self.cases.get(request.id)
        return 0 if case is None else case.times

    def failed(self, request: Request, in_company: bool, weight: float = 1) -> bool:
        """A step with it failed. Whether it is to be given up: tried in company, then alone, it failed each time.

        A suspect is judged by the steps that it had to itself, and by no others. A failure of less `weight` is less
        likely to be a request's fault.
        """
        case = self.cases.setdefault(request.id, _Case())
        case.failed_at = max(case.failed_at, len(request.tokens))
        if case.alone and in_company:
            return False
        case.failures += weight
        case.times += 1
        if case.alone:
            return case.failures >= self._most + self._most_alone
        if case.failures >= self._most:
            case.failures = self._most
            case.alone = True
            self.suspects.append(request)
        return False

    def seen_working(self, request: Request, position: int) -> bool:
        """It was computed up to `position` without a failure. Whether it was a suspect and is none any more."""
        case = self.cases.get(request.id)
        if case is None or position < case.failed_at:
            return False
        self.forget(request)
        return case.alone

    def noted(self, request: Request) -> None:
        """It was in a failed step, but that is no fault of its own."""
        case = self.cases.setdefault(request.id, _Case())
        case.failed_at = max(case.failed_at, len(request.tokens))

    def forget(self, request: Request) -> None:
        case = self.cases.pop(request.id, None)
        if case is not None and case.alone:
            self.suspects.remove(request)
