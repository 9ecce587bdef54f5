"""What the command-line tests share."""

import pytest
from typer.testing import CliRunner

from tokenmill.cli import options
from tokenmill.cli.app import app


@pytest.fixture
def invoke(monkeypatch):
    """Run the command line in this process, with a stub in place of the model."""

    def invoke(stub, *args, stdin=""):
        monkeypatch.setattr(options, "open_llm", stub.open)
        return CliRunner().invoke(app, list(args), input=stdin)

    return invoke
