"""A CPU that is slower than it need be says so, without being asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny

from tokenmill.cli import options
from tokenmill.engine import choices
from tokenmill.ops.native.library import Library, load


def told(capsys: pytest.CaptureFixture[str], folder: Path, **chosen: str) -> str:
    options.open_llm(
        write_tiny(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, **chosen
    ).shutdown()
    return capsys.readouterr().err


def test_half_precision_that_was_asked_for_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, tmp_path, dtype="bfloat16")
    assert "library is not used, because it computes in float32 and dtype is bfloat16" in found
    assert "leave dtype out" in found


def test_a_missing_library_is_told_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "load_native", lambda *_: "there is no C++ compiler")
    found = told(capsys, tmp_path)
    assert "library is not there, so this is slower than it could be: there is no C++ compiler" in found


def test_nothing_is_told_of_what_was_chosen_or_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "library is" not in told(capsys, tmp_path, dtype="bfloat16", ops="reference")
    if isinstance(load(), Library):
        assert "library is" not in told(capsys, tmp_path)
