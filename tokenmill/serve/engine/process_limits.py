"""What a process asks of the system: files, and precedence.

The front has little to do, but at once; the engine computes on every core. Where the system lets us, the
front and the threads that carry messages go first, so that a token does not wait for a time slice to end.

Niceness alone does not do it: the client that a written token wakes takes its turn (until the next tick, 4 ms) from
whoever has computed last, however nice. Only a real-time class is not put aside so; Linux keeps it from taking all."""

from __future__ import annotations

import contextlib
import os
import resource

AHEAD = 20  # steps of niceness


def niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def raise_priority() -> None:
    """This thread, and those that it starts from now on, go before others. Needs a privilege, and does without."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness() - AHEAD, -20))
    if hasattr(os, "SCHED_RR"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def restore_priority(niceness: int) -> None:
    """Back in line, as are the threads started from now on; those that run already keep what they have."""
    if hasattr(os, "SCHED_RR"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def allow_files(wanted: int) -> None:
    """Every connection is a file: ask the system for as many as it grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
