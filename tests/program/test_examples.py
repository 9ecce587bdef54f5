"""Every example runs, and says what it was spared."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_what_it_was_spared(example: Path, default_model: str) -> None:
    done = subprocess.run([sys.executable, str(example), default_model], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    spared = re.search(r"(\d+) of (\d+) prompt tokens", done.stdout)
    assert spared is not None and 0 < int(spared[1]) < int(spared[2])
    if "modules" in example.stem:
        copied = re.search(r"(\d+) were copied from documents", done.stdout)
        assert copied is not None and int(copied[1]) > int(spared[2]) / 2
