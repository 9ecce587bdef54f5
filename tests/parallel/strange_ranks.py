"""A fork server whose ranks misbehave when they meet certain tokens. Run as a program, in place of the real one."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from tokenmill.engine import rank_model
from tokenmill.engine.ranks import fork_server, orders
from tokenmill.engine.step import Pending, Step

RAISES, DIES = 101, 103  # tokens

COMMAND = (sys.executable, __file__)
LATE = (*COMMAND, "late")  # its ranks are ready before it says which processes they are


class Strange:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def launch(self, step: Step) -> Pending:
        tokens = {token for one in step.admissions for token in one.tokens}
        if RAISES in tokens:
            raise ValueError("this rank cannot add")
        if DIES in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        return self._inner.launch(step)


def say_late(*said: Any) -> None:
    if "forked" in said[1]:
        time.sleep(3)
    orders.send_order(*said)


def main() -> int:
    if "late" in sys.argv:
        fork_server.send_order = say_late
    original = rank_model.RankModel.runner
    rank_model.RankModel.runner = lambda self, *args, **more: Strange(original(self, *args, **more))  # type: ignore
    return fork_server.main()


if __name__ == "__main__":
    sys.exit(main())
