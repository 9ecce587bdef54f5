"""The front goes before the engine where the system lets it, and the engine's threads that compute do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tokenmill.serve.engine import process_limits

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_RR"), reason="needs Linux")

# In a process of its own: what a thread takes, threads that it starts inherit.
SCRIPT = """
import os, threading
from tokenmill.serve.engine import process_limits
own = process_limits.niceness()
def seen(name):
    print(name, os.sched_getscheduler(0), process_limits.niceness())
process_limits.raise_priority()
seen("taken")
inherits = threading.Thread(target=seen, args=("inherited",))
inherits.start()
inherits.join()
process_limits.restore_priority(own)
seen("back")
late = threading.Thread(target=seen, args=("late",))
late.start()
late.join()
"""


def may_be_real_time() -> bool:
    """Whether a thread of ours may enter the class; tried in a thread, which is then over."""
    found = []

    def attempt() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            found.append(True)
        except OSError:
            found.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0]


def test_precedence_is_taken_inherited_and_given_back():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    seen = {name: (int(policy), int(nice)) for name, policy, nice in (line.split() for line in ran.stdout.splitlines())}
    if may_be_real_time():
        assert seen["taken"][0] == seen["inherited"][0] == os.SCHED_RR
    ours = (os.SCHED_OTHER, process_limits.niceness())
    assert seen["back"] == seen["late"] == ours
