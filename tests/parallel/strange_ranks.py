"""A fork server whose ranks misbehave when they meet certain tokens. Run as a program, in place of the real one."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tokenmill.engine import rank_model
from tokenmill.engine.ranks import fork_server
from tokenmill.engine.step import Pending, Step

RAISES, DIES = 101, 103  # tokens

COMMAND = (sys.executable, __file__)


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


def main() -> int:
    original = rank_model.RankModel.runner
    rank_model.RankModel.runner = lambda self, *args, **more: Strange(original(self, *args, **more))  # type: ignore
    return fork_server.main()


if __name__ == "__main__":
    sys.exit(main())
