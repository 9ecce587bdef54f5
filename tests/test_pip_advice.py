"""The command that adds optional packages fits how this package is there: installed, or as a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenmill import errors


def test_an_installed_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "tokenmill" / "errors.py"))
    monkeypatch.chdir(tmp_path)
    assert errors.pip_install("serve") == f"{sys.executable} -m pip install 'tokenmill[serve]'"


def test_a_checkout_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "tokenmill" / "errors.py"))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(errors.sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert errors.pip_install("serve") == f"{tmp_path}/.venv/bin/python -m pip install -e '{tmp_path}[serve]'"
    monkeypatch.chdir(tmp_path)  # where nobody has activated the environment that `make run` made
    assert errors.pip_install("otel") == ".venv/bin/python -m pip install -e '.[otel]'"
