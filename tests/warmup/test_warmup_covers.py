"""After the warm-up nothing is compiled: whatever random steps launch on a Hopper GPU, the warm-up has listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_random_steps_launch_nothing_that_the_warm_up_does_not_know() -> None:
    """Of every model in one process: most of the time goes into its start."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "coverage.py"), "15"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6 and not any(found.values()), found
