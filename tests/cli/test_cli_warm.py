"""`tokenmill warm` leaves the cache such that a start finds everything there."""

from __future__ import annotations

from typer.testing import CliRunner

from tokenmill.cli.app import app


def test_a_machine_without_a_gpu_says_what_it_could_not_do(tiny_model: str) -> None:
    done = CliRunner().invoke(app, ["warm", tiny_model, "--load-format", "dummy", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "device       cpu" in done.output
    assert "on a machine that has one" in done.output
