"""Stored responses stay within their bounds, and no tenant pays for another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.serve.api.response_items import referenced, resolved
from tokenmill.serve.api.responses import _ResponseBuilder
from tokenmill.serve.storage.stored_responses import StoredResponse, StoredResponses


def stored(id: str, size: int = 0, previous: str | None = None) -> StoredResponse:
    return StoredResponse(id, previous, b"x" * size)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_nobody_asks_for_is_forgotten() -> None:
    clock = Clock()
    kept = StoredResponses(10**6, 60.0, clock)
    kept.keep("a", stored("r1"))
    kept.keep("a", stored("r2"))
    clock.now = 50.0
    assert kept.get("a", "r1") is not None
    clock.now = 100.0
    assert kept.get("a", "r2") is None and kept.get("a", "r1") is not None
    clock.now = 161.0
    kept.keep("b", stored("r3"))  # whoever comes tidies up
    assert len(kept) == 1


def test_a_conversation_keeps_all_its_turns_alive() -> None:
    clock = Clock()
    kept = StoredResponses(10**6, 60.0, clock)
    kept.keep("a", stored("r0"))
    for turn in range(1, 10):
        clock.now += 40.0
        assert [one.id for one in kept.chain("a", f"r{turn - 1}")] == [f"r{n}" for n in range(turn)]
        kept.keep("a", stored(f"r{turn}", previous=f"r{turn - 1}"))


def test_the_tenant_who_has_most_gives_way() -> None:
    kept = StoredResponses(20_000, 60.0, Clock())
    kept.keep("modest", stored("r", 1000))
    for number in range(100):
        kept.keep("greedy", stored(f"g{number}", 3000))
    assert kept.get("modest", "r") is not None
    assert kept.get("greedy", "g0") is None and kept.get("greedy", "g99") is not None
    kept.keep("greedy", stored("huge", 30_000))  # larger than all there is
    assert kept.get("greedy", "huge") is None and kept.get("modest", "r") is not None


def test_one_that_grows_is_counted_anew() -> None:
    kept = StoredResponses(20_000, 60.0, Clock())
    growing = stored("r", 1000)
    for size in (0, 5000, 9000, 100):
        growing.made = b"x" * size
        kept.keep("a", growing)
        assert kept._bytes["a"] == 2000 + size
    assert kept.remove("a", "r") and not kept.remove("a", "r")
    assert kept._bytes.total() == 0 and len(kept) == 0


steps = st.tuples(
    st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 9000), st.sampled_from(["keep", "get", "remove"])
)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=60))
def test_bounds_hold_whatever_happens(moves: list[tuple[str, int, int, str]]) -> None:
    clock = Clock()
    kept = StoredResponses(30_000, 25.0, clock)
    for tenant, number, size, what in moves:
        clock.now += 1.0
        if what == "keep":
            kept.keep(tenant, stored(f"r{number}", size))
        elif what == "get":
            kept.get(tenant, f"r{number}")
        else:
            kept.remove(tenant, f"r{number}")
        held = {name: sum(one.counted for one in ones.values()) for name, ones in kept._kept.items()}
        assert sum(held.values()) <= 30_000 and held == dict(kept._bytes)


def test_a_response_made_in_the_background_does_not_hold_its_request() -> None:
    """A request's context has the whole prompt and answer, which nobody counts."""

    async def made() -> StoredResponse:
        builder: Any = _ResponseBuilder.__new__(_ResponseBuilder)
        builder._kept, builder._stored = StoredResponses(10**6, 60.0), StoredResponse("r1", None, b"[]")
        builder._context = SimpleNamespace(
            cancel=lambda: None, record_output=lambda output: output, headers=dict, close=lambda status: None
        )
        builder.told = lambda items, output: {}
        builder.keep = lambda blocks, told: msgspec.Raw(b"{}")

        async def done(*output: Any) -> None:
            """Both the stream's end and what is made of it."""

        builder.finished = done
        builder.run_in_background(SimpleNamespace(last=done))
        assert builder._stored.cancel is not None
        await builder._stored.task
        return builder._stored

    stored = asyncio.run(made())
    assert stored.in_background and stored.cancel is None and stored.task is None


def test_an_item_that_is_referred_to_often_is_read_once_and_counts_each_time() -> None:
    kept = StoredResponses(10**6, 60.0)
    content = [{"type": "input_text", "text": "x" * 1000}]
    item = {"type": "message", "id": "msg_1_i0", "role": "user", "content": content}
    kept.keep("a", StoredResponse("resp_1", None, msgspec.json.encode([item])))
    often = [{"type": "item_reference", "id": "msg_1_i0"}] * 50
    assert referenced(often, kept, "b") == {}
    found = referenced(often, kept, "a")
    items = resolved(often, found, 10**6)
    assert items == [item] * 50 and all(one is items[0] for one in items)
    with pytest.raises(InvalidRequest, match="more than 10000 bytes of stored items"):
        resolved(often, found, 10_000)
