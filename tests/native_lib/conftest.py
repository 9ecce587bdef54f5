"""Native ops are tested at every level of the CPU that this machine has, and with more threads than one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.ops.native import library

# Generated cases, shared with the other implementations, and a tiny model of every architecture.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("ops", "model"))


@pytest.fixture(scope="session")
def native() -> Iterator[library.Library]:
    """The library, or a skip that says why there is none."""
    found = library.load()
    if isinstance(found, str):
        pytest.skip(found)
    threads = found.threads
    yield found
    found.threads = threads


@pytest.fixture(params=range(len(library.LEVEL_NAMES)), ids=library.LEVEL_NAMES)
def level(request: pytest.FixtureRequest, native: library.Library) -> Iterator[int]:
    """Each level in turn; the best one again afterwards."""
    if not native.has_level(request.param):
        pytest.skip(f"this CPU has no {library.LEVEL_NAMES[request.param]}")
    native.level = request.param
    yield request.param
    native.level = native.best_level
