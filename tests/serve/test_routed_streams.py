"""What a replica keeps of streams whose router vanished is bounded, and ends; ids of events say how far they came."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.serve.http import routed_streams
from tokenmill.serve.http.continued import _claimed
from tokenmill.serve.http.event_ids import MOST_SEQUENCES, EventIds, Mark, digest_of, events_of, position_of
from tokenmill.serve.http.routed_streams import LEASE_SECONDS, RoutedStream, RoutedStreams


class Here:
    """Streams that run, or ran, of simulated requests."""

    def __init__(self) -> None:
        self.now, self.given_up = 0.0, []
        self.kept = RoutedStreams(lambda: self.now)

    def enter(self, request: str, attempt: int = 0, tokens: int = 10, tenant: str = "") -> RoutedStream:
        name = f"{request}.{attempt}" if attempt else request
        sequence = SimpleNamespace(num_tokens=tokens, request=SimpleNamespace(logprobs=[]))
        stream: Any = SimpleNamespace(
            request_state=SimpleNamespace(prompt_ids=[1, 2], sequences=[sequence]),
            set_listener=lambda listener: None,
            mark_read=lambda: None,
        )
        one = RoutedStream(tenant, request, name, [stream], lambda: self.given_up.append(name))
        self.kept.enter(one)
        return one


def looked(main: Any) -> None:
    async def inside() -> None:
        main()

    asyncio.run(inside())


def test_what_nobody_fetches_is_given_up_after_a_time() -> None:
    def main() -> None:
        here = Here()
        assert here.kept.leave(here.enter("a")) and len(here.kept) == 1
        here.now = LEASE_SECONDS - 1
        assert here.kept.leave(here.enter("b"))
        here.kept.tidy()
        assert not here.given_up and here.kept.find("a") is not None
        here.now = LEASE_SECONDS + 1
        here.kept.tidy()
        assert here.given_up == ["a"] and here.kept.find("a") is None and here.kept.find("b") is not None
        here.now = 3 * LEASE_SECONDS
        here.kept.tidy()
        assert here.given_up == ["a", "b"] and not len(here.kept) and not here.kept._named and not here.kept._bytes

    looked(main)


def test_there_are_not_more_of_them_than_allowed_nor_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_streams, "MOST_LEFT", 3)
    monkeypatch.setattr(routed_streams, "MOST_BYTES", 100_000)

    def main() -> None:
        here = Here()
        for name in "abcde":
            here.kept.leave(here.enter(name))
        assert here.given_up == ["a", "b"] and len(here.kept) == 3
        grows = here.enter("f", tokens=10)
        here.kept.leave(grows)
        assert here.given_up == ["a", "b", "c"]
        grows.streams[0].request_state.sequences[0].num_tokens = 10_000  # it ran on
        here.kept._look()
        assert not len(here.kept) and here.given_up[-1] == "f" and not here.kept._bytes

    looked(main)


def test_a_router_that_lives_has_the_last_word_whenever_it_is_heard() -> None:
    def main() -> None:
        here = Here()
        running, left = here.enter("a"), here.enter("b")
        here.kept.leave(left)
        here.kept.cancel(["a", "b", "c"])
        assert here.given_up == ["a", "b"] and not here.kept.leave(running)
        late = here.enter("c")  # the word was here first
        assert not here.kept.leave(late) and here.kept.find("c") is None
        assert not len(here.kept) and not here.kept._here

    looked(main)


def test_another_attempt_takes_the_place_of_the_first_and_tenants_do_not_meet() -> None:
    def main() -> None:
        here = Here()
        here.kept.leave(here.enter("a", tenant="x"))
        assert here.kept.find("a", "y") is None and here.kept.find("a", "x") is not None
        here.enter("a", 7, tenant="y")
        assert not here.given_up
        again = here.enter("a", 8, tenant="x")
        assert here.given_up == ["a"] and here.kept.find("a", "x") is again
        here.kept.end(again)
        assert here.kept.find("a", "x") is None

    looked(main)


NAME = "0123456789abcdef" * 2  # as routers name requests
STEPS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 10**6), max_size=4)), max_size=3))


@given(STEPS, st.integers(1, 4), st.integers(0, 2**63 - 1), st.integers(1, 4))
def test_an_id_says_how_far_the_stream_has_come(steps: Any, count: int, seed: int, events: int) -> None:
    ids, said, seen = EventIds(NAME, 5, 1700000000, seed, count), [[] for _ in range(count)], set()
    for step in steps:
        before, news = [Mark(len(one)) for one in said], {}
        for index, tokens in step:
            if index < count and index not in news:
                said[index] += tokens
                news[index] = tokens, Mark(len(said[index]))
        part = ids.stamp_step(b"data: {}\n\n" * events, news, numbered=100)
        assert part.count(b"\n\n") == events
        for number, one in enumerate(events_of(part), 1):
            id = one.decode().split("\n")[0].removeprefix("id: ")
            found = position_of(id)
            assert (found.request, found.home, found.created, found.seed) == (NAME, 5, 1700000000, seed)
            assert found.after == tuple(Mark(len(one)) for one in said) and found.digest == digest_of(said)
            last = number == events
            assert found.before == (found.after if last else tuple(before))
            assert (found.skip, found.numbered) == (0 if last else number, 100 - events + number)
            seen.add(id)


@pytest.mark.parametrize(
    "text",
    ["", "5", "NAME.1.1.1.5.u0.0", "NAME.1.1.1.5.u0.0.1.1", "NAME.g.1.1.5.u0.0.1", "NAME.1.1.1.-5.u0.0.1",
     "NAME.1.1.1.5>4.u1.0.1", "NAME.1.1.1.5.x0.0.1", "NAME.1.1.1.5.u.0.1", "NAME.1.1.ffffffffffffffff.5.u0.0.1",
     "NAME.1.1.1.\u0665.u0.0.1", "NAME.1.1.1." + "-".join("5" * (MOST_SEQUENCES + 1)) + ".u0.0.1", "a" * 2000,
     "ab1.1.1.1.5.u0.0.1", "NAME0.1.1.1.5.u0.0.1", "resp_1.1.1.1.5.u0.0.1", f"{NAME.upper()}.1.1.1.5.u0.0.1"],
)  # fmt: skip
def test_what_is_no_id_of_an_event_is_refused_with_a_sentence(text: str) -> None:
    assert position_of(f"{NAME}.1.1.1.5.u0.0.1").after == (Mark(5),)
    with pytest.raises(InvalidRequest, match=r"Last-Event-ID is .* no id of an event"):
        position_of(text.replace("NAME", NAME))


@pytest.mark.parametrize(
    "tokens, known", [([5, 6], True), ([5, 6, 7, 8], True), ([5, 6, 7, 8, 9], False), ([5, 2], False)]
)
def test_what_a_client_says_that_it_has_does_not_end_an_answer(tokens: list[int], known: bool) -> None:
    """Then there is nothing to go on with."""
    request = SimpleNamespace(max_tokens=5, stop_ids=frozenset({2}))
    fresh: Any = SimpleNamespace(sequences=[SimpleNamespace(request=request)])
    said = _claimed([tokens], [Mark(len(tokens))], fresh, SamplingParams(max_tokens=5))
    assert (said is not None) == known
    if said is not None:
        assert said[0].tokens == tokens and said[0].finish is None
