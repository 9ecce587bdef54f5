"""Folders for downloads: nobody takes one that is just being made for one that a killed process left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.model.weights import scratch


def test_a_folder_that_is_being_locked_is_not_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    flock, found_dead = fcntl.flock, []

    def others_look_first(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        found_dead.extend(scratch._is_dead(folder) for folder in tmp_path.iterdir())
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", others_look_first)
    with scratch.scratch(tmp_path) as folder:
        assert found_dead == [False]
        assert not scratch._is_dead(folder)
    assert not list(tmp_path.iterdir())
