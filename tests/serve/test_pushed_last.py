"""A prompt that is read for another server is over when that has its blocks, or after a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.engine.request import Request
from tokenmill.engine.scheduler import Delta
from tokenmill.params import SamplingParams
from tokenmill.serve.engine import pushed_last
from tokenmill.serve.engine.pushed_last import PushedLast


def delta(id: str, *, pushes: bool, finished: bool = True) -> Delta:
    request = Request(id, [1, 2, 3], SamplingParams(), max_tokens=1, seed=0, pushes=pushes)
    request.identities = [id.encode()]
    return Delta(request, [7], finished=finished)


def test_the_last_word_waits_for_the_blocks_and_nothing_else_does() -> None:
    on_their_way = {b"1"}
    transfers: Any = SimpleNamespace(writing=lambda identities: not on_their_way.isdisjoint(identities))
    pushed = PushedLast(transfers)
    one, begun, other, there = (
        delta("1", pushes=True),
        delta("1", pushes=True, finished=False),
        delta("2", pushes=False),
        delta("3", pushes=True),
    )
    assert pushed.hold_back([begun, other]) == [begun, other]
    assert pushed.hold_back([one, there]) == [there] and len(pushed.held) == 1
    assert pushed.hold_back([other]) == [other]
    on_their_way.clear()
    assert pushed.hold_back([]) == [one] and not pushed.held


def test_blocks_that_never_arrive_are_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed_last, "LONGEST", 0.0)
    pushed = PushedLast(SimpleNamespace(writing=lambda identities: True))  # type: ignore[arg-type]
    one = delta("1", pushes=True)
    assert pushed.hold_back([one]) == [one]


def test_where_nothing_is_pushed_nothing_is_held() -> None:
    one = delta("1", pushes=True)
    assert PushedLast(None).hold_back([one]) == [one]
