"""Lets the tests of adapters use the groups of ranks of the tests of ranks, and the models of the model's tests."""

import sys
from pathlib import Path

for _folder in ("parallel", "model"):
    sys.path.append(str(Path(__file__).parents[1] / _folder))
