"""Lets the tests of ranks use the tiny models of the model's tests, and their driver."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "model"))
