"""The front's side of what ended requests leave behind in the engine: told apart by keys, dropped once."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.engine.request import Finish, Request
from tokenmill.params import SamplingParams
from tokenmill.serve.engine import wire
from tokenmill.serve.engine_client.remote_engine import EngineLoss, RemoteEngine


def request(id: str, continues: str | None = None, keep: bool = True) -> Request:
    return Request(id, [5, 6, 7], SamplingParams(max_tokens=4), max_tokens=4, seed=1, keep=keep, continues=continues)


def ended(key: int, how: str = "length") -> wire.StepDone:
    return wire.StepDone(1, 0.0, 0.0, 1, 0, [wire.SequenceUpdate(key, [8], finish=how)])


@pytest.fixture
def sent() -> list[Any]:
    return []


@pytest.fixture
def remote(sent: list[Any]) -> RemoteEngine:
    remote = RemoteEngine()
    remote.attach(sent.append)
    return remote


def drops(sent: list[Any]) -> list[int]:
    return [one.key for one in sent if isinstance(one, wire.Drop)]


def test_who_continues_is_told_by_key_and_what_is_held_is_dropped_once(remote: RemoteEngine, sent: list[Any]) -> None:
    remote.add(request("a"))
    key = sent[-1].sequences[0].key
    assert sent[-1].keep and sent[-1].continues is None
    remote.take_in(ended(key))
    remote.add(request("b", continues="a"))
    assert sent[-1].continues == key
    remote.drop_held("a")
    remote.drop_held("a")
    remote.drop_held("never")
    assert drops(sent) == [key]
    remote.add(request("c", continues="a"))
    assert sent[-1].continues is None  # it is computed anew


@pytest.mark.parametrize("why", [Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR])
def test_who_is_given_up_while_the_engine_ends_it_well_leaves_nothing(
    remote: RemoteEngine, sent: list[Any], why: Finish
) -> None:
    remote.add(request("a"))
    key = sent[-1].sequences[0].key
    remote.cancel("a", why)
    assert [type(one) for one in sent[-2:]] == [wire.Cancel, wire.Drop] and drops(sent) == [key]
    remote.drop_held("a")
    assert drops(sent) == [key]


def test_a_stop_string_keeps_what_was_said(remote: RemoteEngine, sent: list[Any]) -> None:
    remote.add(request("a"))
    key = sent[-1].sequences[0].key
    remote.cancel("a", Finish.STOP)
    assert not drops(sent)
    remote.drop_held("a")
    assert drops(sent) == [key]


@pytest.mark.parametrize("how", ["error", "deadline"])
def test_what_failed_is_not_held(remote: RemoteEngine, sent: list[Any], how: str) -> None:
    remote.add(request("a"))
    remote.take_in(ended(sent[-1].sequences[0].key, how))
    remote.drop_held("a")
    assert not drops(sent)


def test_another_engine_knows_nothing_of_what_the_last_one_held(remote: RemoteEngine, sent: list[Any]) -> None:
    remote.add(request("a"))
    remote.take_in(ended(sent[-1].sequences[0].key))
    remote.add(request("b", continues="a"))
    remote.lose(EngineLoss("killed"))
    sent.clear()
    remote.attach(sent.append)
    [again] = sent
    assert again.keep and again.continues is None
    remote.drop_held("a")
    assert not drops(sent)


def test_nobody_else_pays_for_it(remote: RemoteEngine, sent: list[Any]) -> None:
    remote.add(request("a", keep=False))
    remote.take_in(ended(sent[-1].sequences[0].key))
    remote.add(request("b", keep=False))
    remote.cancel("b")
    assert not drops(sent)
