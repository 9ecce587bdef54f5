"""Fixtures that more than one test room uses."""

from __future__ import annotations

import signal

import pytest
from tiny import write_tiny

# A shell starts what runs in the background with Ctrl-C ignored, and every program that a test starts would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def default_model() -> str:
    """The path of the default model, or a skip where it can neither be found nor fetched."""
    from tokenmill.errors import ModelError
    from tokenmill.model.weights.source import resolve

    try:
        return str(resolve("default").path)
    except ModelError as error:
        pytest.skip(f"the default model is not to be had here: {error}")
