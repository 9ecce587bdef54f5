"""Fixtures that more than one test room uses."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
from hypothesis import settings
from tiny import write_tiny

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, whichever test does so first

# A shell starts what runs in the background with Ctrl-C ignored, and every program that a test starts would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What decides whether a change goes in looks at the same examples each time; `make test-slow` looks at new ones.
settings.register_profile("same", settings.get_profile("ci"))
settings.register_profile("new", print_blob=True)


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
