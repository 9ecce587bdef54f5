"""Sessions keep their bounds and their books, however calls overlap; over a service that answers at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.outputs import CompletionOutput, Logprob, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.serve.api import session_call
from tokenmill.serve.api.session_call import SessionCall
from tokenmill.serve.api.session_steps import steps_of
from tokenmill.serve.engine_client import sessions
from tokenmill.serve.engine_client.sessions import Session, Sessions, State
from tokenmill.serve.engine_client.text_pool import SHORT, TextPool
from tokenmill.serve.errors import HttpError

GEN = {"gen": {"max_tokens": 5}}


class FakeService:
    """A token is a character, and an answer as many x as it may have. What is kept is in `held`."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(bound=None, eos_ids=(), chat_template=None, encode=self.encode)
        self.texts, self.facts = TextPool(), SimpleNamespace(max_len=100_000)
        self.threads: dict[str, threading.Thread] = {}  # that made a text tokens
        self.held: set[str] = set()
        self.go_on = asyncio.Event()  # answers wait for it
        self.go_on.set()
        self._made = 0
        self.prompts = SimpleNamespace(check_params=self.check_params)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads[text] = threading.current_thread()
        return [ord(one) for one in text]

    async def submit(self, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        self._made += 1
        if params.bad_words == ["refused later"]:
            raise InvalidRequest("bad_words is refused")
        id, tokens = f"request {self._made}", prompt["prompt_token_ids"]

        async def last() -> RequestOutput:
            await self.go_on.wait()
            self.held.add(id)
            count = params.max_tokens or 1
            said = CompletionOutput(0, "x" * count, [ord("x")] * count, finish_reason="length")
            scores: Any = [{token: Logprob(-1.0, 1)} for token in tokens]
            return RequestOutput(id, None, tokens, [said], prompt_logprobs=scores, finished=True)

        async def aclose() -> None:
            pass

        return SimpleNamespace(request_id=id, last=last, aclose=aclose)

    async def check_params(self, asked: list[SamplingParams]) -> None:
        if any(one.bad_words == ["refused at once"] for one in asked):
            raise InvalidRequest("bad_words is refused")

    def drop_held(self, id: str) -> None:
        self.held.discard(id)


class Opened:
    def __init__(self, most_tokens: int = 10**6, lease: float = 60.0) -> None:
        self.service: Any = FakeService()
        self.sessions = Sessions(4, most_tokens)
        self.session: Session = self.sessions.open("ann", self.service, {}, lease)

    def call(self, *steps: Any, state: str = "main") -> SessionCall:
        return SessionCall(self.sessions, self.session, self.session.state(state), steps_of(list(steps)))

    async def do(self, *steps: Any, state: str = "main") -> dict[str, Any]:
        return await asyncio.wait_for(self.call(*steps, state=state).run(), 20)

    @property
    def size(self) -> int:
        return sum(one.size for one in self.session.states.values())

    def finish(self) -> None:
        """The books are right, and nothing stays."""
        assert self.sessions._tokens["ann"] == self.size
        self.sessions.close(self.session, "closed", "it was closed")
        assert self.sessions._tokens["ann"] == 0 and not self.service.held
        self.service.texts.close()


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__ = test.__name__
    return run


@on_a_loop
async def test_one_call_cannot_hold_more_than_is_allowed() -> None:
    it = Opened(most_tokens=1000)
    many = {"fork": [f"f{number}" for number in range(500)]}
    with pytest.raises(HttpError, match="1000 are allowed"):
        await it.do("a" * 900, many)
    assert it.size == 900 and set(it.session.states) == {"main"}
    with pytest.raises(HttpError, match="1000 are allowed"):
        it.call("a" * 101)  # is refused before anything is done
    await it.do("a" * 50, GEN)
    with pytest.raises(HttpError, match="1000 are allowed"):
        await it.do({"gen": {"max_tokens": 40}}, {"gen": {"max_tokens": 40}}, {"gen": {"max_tokens": 40}})
    assert it.size == 900 + 50 + 5 + 80  # one answer more than is allowed, and no second one
    it.finish()


@on_a_loop
async def test_who_holds_too_much_may_renew_and_drop() -> None:
    it = Opened(most_tokens=100)
    await it.do("a" * 20, {"fork": ["b"]})
    await it.do({"gen": {"max_tokens": 90}})
    with pytest.raises(HttpError, match="hold 130 tokens"):
        it.call(GEN)
    await it.do()
    await it.do({"drop": ["main"]}, GEN, state="b")
    assert it.size == 25
    it.finish()


@on_a_loop
async def test_a_state_that_became_busy_is_not_dropped() -> None:
    it = Opened()
    await it.do("hello", {"fork": ["b", "c"]})
    it.service.go_on.clear()
    dropping = asyncio.create_task(it.do(GEN, {"drop": ["c", "b"]}))
    await asyncio.sleep(0)
    other = asyncio.create_task(it.do(GEN, GEN, state="b"))
    await asyncio.sleep(0)
    it.service.go_on.set()
    with pytest.raises(HttpError, match="'b' is gone or at work on another call"):
        await dropping
    assert len((await other)["results"]) == 2 and set(it.session.states) == {"main", "b", "c"}
    it.finish()


@on_a_loop
async def test_a_call_on_a_state_that_was_dropped_meanwhile_is_refused() -> None:
    it = Opened()
    await it.do("hello", {"fork": ["b"]})
    late, twice = it.call(GEN, state="b"), it.call({"drop": ["b"]})
    await it.do({"drop": ["b"]})
    for call, said in ((late, "was dropped"), (twice, "is gone")):
        with pytest.raises(HttpError, match=said):
            await asyncio.wait_for(call.run(), 20)
    it.finish()


@on_a_loop
async def test_a_call_on_a_session_that_was_closed_meanwhile_changes_no_books() -> None:
    it = Opened()
    await it.do("hello", {"fork": ["b"]})
    late = it.call({"drop": ["b"]})
    it.sessions.close(it.session, "closed", "it was closed")
    with pytest.raises(HttpError, match="the session has ended: it was closed"):
        await late.run()
    assert it.sessions._tokens["ann"] == 0
    it.service.texts.close()


@on_a_loop
async def test_two_calls_that_fork_the_same_name_make_one_state() -> None:
    it = Opened()
    await it.do("hello", {"fork": ["b"]})
    one, other = it.call(GEN, {"fork": ["x"]}), it.call("there", GEN, {"fork": ["x"]}, state="b")
    found = await asyncio.gather(one.run(), other.run(), return_exceptions=True)
    assert [type(told) for told in found] == [dict, InvalidRequest] and "state of this name" in str(found[1])
    it.finish()


def test_two_calls_that_fork_keep_the_bound_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_a_loop
    async def run() -> None:
        it = Opened()
        await it.do("hello", {"fork": ["b"]})
        calls = [it.call(GEN, {"fork": [f"{name}1", f"{name}2"]}, state=name) for name in ("main", "b")]
        found = await asyncio.gather(*(call.run() for call in calls), return_exceptions=True)
        assert "would make 6 states" in str(found[1]) and len(it.session.states) == 4
        it.finish()

    monkeypatch.setattr(session_call, "MOST_STATES", 5)
    run()


@on_a_loop
async def test_long_texts_are_made_tokens_away_from_the_loop_for_forks_and_choices_too() -> None:
    it = Opened()
    texts = ["a" * 2 * SHORT, *("b" * 2 * SHORT, "c" * 2 * SHORT), "d" * 2 * SHORT]
    await it.do(texts[0], {"select": {"choices": texts[1:3]}})
    await it.do(texts[3], {"fork": ["x"]})
    assert all(it.service.threads[text] is not threading.current_thread() for text in texts)
    assert len(it.session.state("x").sequence.tokens) == 6 * SHORT
    it.finish()


@on_a_loop
async def test_a_lease_that_is_shortened_ends_sooner() -> None:
    it = Opened(lease=30.0)
    it.sessions.renew(it.session, 0.05)
    async with asyncio.timeout(20):
        while len(it.sessions):
            await asyncio.sleep(0.02)
    assert it.session.ended is not None
    it.service.texts.close()


@on_a_loop
async def test_a_dropped_state_is_still_paid_for() -> None:
    it = Opened()
    await it.do("hello", {"fork": ["b"]})
    await it.do(GEN, state="b")
    before = it.session.usage
    await it.do({"drop": ["b"]})
    assert it.session.usage == before and before.output_tokens == 6  # one of them to read what was forked
    it.finish()


def test_room_is_looked_at_without_a_walk_over_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_a_loop
    async def run() -> None:
        it = Opened()
        await it.do("hello", {"fork": [f"f{number}" for number in range(50)]})
        asked: list[State] = []
        with monkeypatch.context() as patch:
            patch.setattr(State, "size", property(lambda state: asked.append(state) or 5))
            it.sessions.check_room(it.session, 10**6 - 51 * 5)
        assert not asked
        with pytest.raises(HttpError, match="hold 255 tokens"):
            it.sessions.check_room(it.session, 10**6)
        it.finish()

    run()


@on_a_loop
async def test_what_is_refused_leaves_the_state_as_it_was() -> None:
    """At once, or when it was handed on already: the text before it is not there, and the state goes on."""
    it = Opened()
    for wrong in ({"gen": {}}, {"select": {"choices": ["a", "b"]}}, {"gen": {"bad_words": ["refused at once"]}}):
        with pytest.raises(InvalidRequest):
            await it.do(*(["hello"] if "bad_words" in str(wrong) else ["", wrong]), wrong)
        assert it.size == 0 and it.session.state("main").sequence.error is None
    await it.do("hello", GEN)
    text = it.session.state("main").sequence.text
    for piece in (["more", GEN, "then"], ["then"]):
        with pytest.raises(InvalidRequest, match="refused"):
            await it.do(*piece, {"gen": {"bad_words": ["refused later"]}})
        done = "morexxxxx" if len(piece) > 1 else ""  # what was done before the step that is refused stays
        text += done
        assert it.session.state("main").sequence.text == text and it.size == len(text)
        assert it.session.state("main").sequence.error is None
    told = await it.do("end", GEN)
    assert told["text"] == "endxxxxx" and it.size == len(text) + 8
    it.finish()


def test_states_without_text_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_TENANT_STATES", 10)

    @on_a_loop
    async def main() -> None:
        it = Opened()
        await it.do({"fork": [f"{number}" for number in range(8)]})
        with pytest.raises(HttpError, match="9 states, this would add 2, and 10 are allowed"):
            await it.do({"fork": ["a", "b"]})
        other = it.sessions.open("ann", it.service, {}, 60.0)
        with pytest.raises(HttpError, match="10 are allowed"):
            it.sessions.open("ann", it.service, {}, 60.0)
        it.sessions.open("bob", it.service, {}, 60.0)
        await it.do({"drop": ["1", "2"]})
        it.sessions.close(other, "closed", "it was closed")
        await it.do({"fork": ["a", "b", "c"]})
        assert it.sessions._states["ann"] == 10
        it.finish()
        assert it.sessions._states["ann"] == 0

    main()


@on_a_loop
async def test_a_session_whose_adapter_was_unloaded_is_told_so_and_goes_on_when_it_is_back() -> None:
    it = Opened()
    it.service.adapters = SimpleNamespace(known={"mill": 1})
    it.session = it.sessions.open("ann", it.service, {"adapter": "mill"}, 60.0)
    await it.do("hello", GEN)
    it.service.adapters.known.clear()
    with pytest.raises(HttpError, match="'mill' of this session is not loaded any more") as told:
        it.call("more", GEN)
    assert told.value.status == 404
    it.service.adapters.known["mill"] = 1
    working = it.call("more", GEN, "end", GEN)
    it.service.adapters.known.clear()  # after it was checked
    with pytest.raises(HttpError, match="not loaded any more"):
        await working.run()
    it.service.adapters.known["mill"] = 1
    assert (await it.do("more", GEN))["text"] == "morexxxxx"
    it.finish()
