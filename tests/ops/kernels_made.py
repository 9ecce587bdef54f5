"""What kernels become for a GPU that is not there: scripts/compile_kernels.py, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_kernels.py"


def compiled(only: str, folder: Path, gpu: str = "h200", timeout: int = 300) -> dict[str, dict[str, int]]:
    """What the kernels of these cases became; an error if one was refused."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT), "--gpu", gpu, "--only", only, "--save", str(folder / "made.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    made: dict[str, dict[str, int]] = json.loads((folder / "made.json").read_text())
    return made
