"""Precedence: the front has little to do, but at once; the engine computes on every core. Where the system lets us, the
front and the threads that carry messages go first, so that a token does not wait for a time slice to end."""

from __future__ import annotations

import contextlib
import os

AHEAD = 20  # steps of niceness


def niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def take() -> None:
    """This thread, and those that it starts from now on, go before others. Needs a privilege, and does without."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness() - AHEAD, -20))


def give_back(niceness: int) -> None:
    """Back in line, as are the threads started from now on; those that run already keep what they have."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
