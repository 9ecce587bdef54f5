"""The errors a user can meet; each message says what happened, with which value, and what to do."""

from __future__ import annotations

import sys
from pathlib import Path


class TokenmillError(Exception):
    """Base of every error that tokenmill raises on purpose."""


class InvalidRequest(TokenmillError, ValueError):
    """One request is wrong; the engine goes on serving the others."""


class QueueFull(TokenmillError):
    """The waiting queue is at its limit; try again later or raise `max_queued_tokens`."""


class ConfigError(TokenmillError, ValueError):
    """A setting cannot be respected; the message says what to change."""


class ModelError(TokenmillError):
    """A checkpoint, tokenizer or architecture cannot be used; the message says why."""


class StepFailed(TokenmillError):
    """A launched step did not finish; its requests will be tried again, then alone."""


class PeerLostError(StepFailed):
    """A rank of the group is gone, or its generation has ended: nothing that was launched on it counts."""


def pip_install(extra: str) -> str:
    """The command that adds optional packages to the Python that runs this; a checkout comes from its own folder."""
    checkout, here = Path(__file__).parents[1], Path.cwd()
    python = Path(sys.executable)
    pip = f"{python.relative_to(here) if python.is_relative_to(here) else python} -m pip install"
    if not (checkout / "pyproject.toml").is_file():
        return f"{pip} 'tokenmill[{extra}]'"
    return f"{pip} -e '{'.' if checkout == here else checkout}[{extra}]'"
