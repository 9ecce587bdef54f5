"""Ranks that share a GPU under MPS exchange tensors through symmetric memory as the protocol says, in graphs too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="MPS is not there"),
]

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_collectives.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_verbs_are_right_called_and_replayed(ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--ranks", str(ranks), "--check-only"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and f"right for {ranks} ranks" in done.stdout, done.stderr
