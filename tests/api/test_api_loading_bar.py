"""Whoever waits for a model at a terminal sees what is being done."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.loading_bar import loading_bar


class FakeBar:
    made: list[FakeBar]

    def __init__(self, **options: Any) -> None:
        self.options, self.n, self.closed = options, 0, False
        self.made.append(self)

    def update(self, more: int) -> None:
        self.n += more

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[FakeBar]:
    FakeBar.made = []
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=FakeBar))
    return FakeBar.made


def test_each_thing_has_a_bar_that_ends_when_the_next_begins(bars: list[FakeBar]) -> None:
    with loading_bar(None) as tell:
        assert tell is not None
        tell(0, 2, "compiling CPU kernels")
        tell(2, 2, "compiling CPU kernels")
        tell(10, 100, "loading weights")
        assert [bar.closed for bar in bars] == [True, False]
        tell(70, 100, "loading weights")
    assert [(bar.options["desc"], bar.n, bar.closed) for bar in bars] == [
        ("compiling CPU kernels", 2, True),
        ("loading weights", 70, True),
    ]
    # Only at a terminal, and only what takes longer than a moment.
    assert all(bar.options["disable"] is None and bar.options["delay"] == 1.0 for bar in bars)


def test_a_bar_is_closed_when_loading_fails(bars: list[FakeBar]) -> None:
    with pytest.raises(ValueError, match="broken"), loading_bar(None) as tell:
        assert tell is not None
        tell(1, 2, "loading weights")
        raise ValueError("broken")
    assert bars[0].closed


def test_a_callback_of_the_users_own_is_all_that_is_called(bars: list[FakeBar]) -> None:
    seen: list[tuple[int, int, str]] = []

    def mine(done: int, total: int, what: str) -> None:
        seen.append((done, total, what))

    with loading_bar(mine) as tell:
        assert tell is mine
    assert bars == []


def test_a_model_that_is_loaded_shows_its_bar(bars: list[FakeBar], default_model: str) -> None:
    from tokenmill import LLM

    with LLM(default_model, kv_cache_memory=1 << 24):
        pass
    (loading,) = [bar for bar in bars if bar.options["desc"] == "loading weights"]
    assert loading.n == loading.options["total"] > 10**8 and loading.closed
