"""Fixtures for tests that read model files."""

from pathlib import Path

import pytest

from tokenmill.errors import ModelError
from tokenmill.model.weights import source


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    try:
        return source.resolve("default").path
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")
