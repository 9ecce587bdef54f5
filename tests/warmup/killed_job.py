"""A specialization whose compilation kills its process, as a lack of memory or a bug in a compiler would."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from tokenmill.ops.triton.specializations import Specialization


class KilledJob(Specialization):
    def jitted(self) -> Any:
        return SimpleNamespace(src="")

    def compile(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_job() -> KilledJob:
    return KilledJob(__name__, "killed", (), ())
