"""The suffix index finds what a plain search finds, holds what it was given room for, and keeps tenants apart."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import SamplingParams
from tokenmill.engine.request import Request
from tokenmill.engine.speculation import suffix
from tokenmill.engine.speculation.suffix import SuffixProposer
from tokenmill.ops.native.library import Library, load

native = load()
pytestmark = pytest.mark.skipif(not isinstance(native, Library), reason=f"needs the native library: {native}")


def proposer(capacity: int = 4096, bits: int = 12) -> SuffixProposer:
    assert isinstance(native, Library)
    return SuffixProposer(native, capacity, bits)


def request(id: str, tokens: list[int], prompt_len: int | None = None, salt: str = "") -> Request:
    one = Request(id, tokens[:prompt_len], SamplingParams(), max_tokens=10_000, seed=0, salt=salt)
    if prompt_len is not None:
        one.tokens += tokens[prompt_len:]
    return one


def in_use(one: SuffixProposer) -> int:
    return int(one._c.tm_suffix_pages_in_use(one._index))


def longest_match(tokens: list[int]) -> int:
    """How long the longest end of the text is that stands in it before with something behind it."""
    best = 0
    for at in range(1, len(tokens)):
        length = 0
        while length < at and tokens[at - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, length)
    return best


def test_a_text_that_repeats_itself_is_continued() -> None:
    text = [11, 12, 13, 14, 15, 16, 17, 18]
    [draft] = proposer().propose([request("a", [1, 2, *text, 3, *text[:3]])], 6)
    assert draft is not None and draft.tokens == [14, 15, 16, 17, 18, 3]


def test_a_text_that_goes_round_is_drafted_at_full_length() -> None:
    [draft] = proposer().propose([request("a", [1, 2, 3, 7, 8, 9, 7, 8, 9])], 8)
    assert draft is not None and draft.tokens == [7, 8, 9, 7, 8, 9, 7, 8]
    index, answer = proposer(), [200, 201, 202, 203]
    index.propose([request("b", [1, *answer], prompt_len=1)], 4)
    [draft] = index.propose([request("c", [5, 200, 201])], 8)  # another's text ends, and that is all that is known
    assert draft is not None and draft.tokens == [202, 203]


def test_nothing_is_proposed_where_nothing_stood_before() -> None:
    assert proposer().propose([request("a", list(range(50)))], 4) == [None]
    assert proposer().propose([request("b", [7])], 4) == [None]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 3), min_size=2, max_size=300), st.integers(1, 6))
def test_what_is_proposed_followed_the_same_tokens_before(tokens: list[int], grows_by: int) -> None:
    index, one = proposer(), request("a", tokens[:2])
    for at in range(2, len(tokens), grows_by):
        one.tokens += tokens[at : at + grows_by]
        [draft] = index.propose([one], 4)
        text, longest = one.tokens, longest_match(one.tokens)
        assert (draft is not None) == (longest >= 2) or longest == 2  # the two newest places of a pair may be others'
        if draft is not None:
            goes_on = [*text, *draft.tokens]  # the newest place may be so near that what follows is the draft itself
            starts = [i for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]]
            assert len(draft.tokens) == 4 and any(goes_on[i : i + 4] == draft.tokens for i in starts)


def test_long_texts_are_found_across_pages_and_the_longest_match_wins() -> None:
    random = Random(0)
    text = [random.randrange(1000) for _ in range(700)]
    other = [random.randrange(1000) for _ in range(30)]
    # the last two tokens of what is repeated stand elsewhere, too, more recently, with something else behind them
    one = request("a", [*text, *other, *text[398:400], 5, 6, *text[370:400]])
    [draft] = proposer().propose([one], 8)
    assert draft is not None and draft.tokens == text[400:408]


def test_an_answer_helps_the_next_request_and_a_prompt_does_not() -> None:
    index = proposer()
    prompt, answer = list(range(100, 120)), list(range(200, 220))
    first = request("a", prompt + answer, prompt_len=20)
    index.propose([first], 4)
    index.ended(first)
    [from_answer, from_prompt] = index.propose([request("b", [1, *answer[3:6]]), request("c", [1, *prompt[3:6]])], 3)
    assert from_answer is not None and from_answer.tokens == answer[6:9]
    assert from_prompt is None


@pytest.mark.parametrize("ended", [False, True])
def test_tenants_do_not_learn_from_each_other(ended: bool) -> None:
    index, answer = proposer(), list(range(200, 220))
    first = request("a", [1, 2, *answer], prompt_len=2, salt="one")
    index.propose([first], 4)
    if ended:
        index.ended(first)
    same, other = request("b", [1, *answer[3:6]], salt="one"), request("c", [1, *answer[3:6]], salt="two")
    drafts = index.propose([same, other], 3)
    assert drafts[0] is not None and drafts[1] is None


def test_what_is_forgotten_is_not_found() -> None:
    index, answer = proposer(), list(range(200, 220))
    first, second = (request(id, [1, 2, *answer], prompt_len=2, salt=id) for id in "ab")
    index.propose([first, second], 4)
    index.ended(first)
    index.forget("a")
    found = index.propose([request(f"{salt}2", [1, *answer[3:6]], salt=salt) for salt in "ab"], 3)
    assert found[0] is None and found[1] is not None
    index.forget()
    assert in_use(index) == 0 and index.propose([request("b3", [1, *answer[3:6]], salt="b")], 3) == [None]


def test_memory_is_bounded_and_ended_prompts_give_theirs_back() -> None:
    index = proposer(capacity=1024, bits=8)
    random = Random(1)
    for number in range(40):  # far more than fits
        one = request(f"r{number}", [random.randrange(50) for _ in range(150)], prompt_len=50 + number)
        index.propose([one], 8)
        assert in_use(index) <= 16
        if number % 3:
            index.ended(one)
    index = proposer(capacity=1024)
    one = request("a", list(range(600)))
    index.propose([one], 8)
    assert in_use(index) == 10
    index.ended(one)
    assert in_use(index) == 0


def test_a_long_prompt_is_taken_in_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MOST_READ", 100)
    index = proposer()
    one = request("a", [*range(250), *range(30, 40)])
    found = [index.propose([one], 2)[0] for _ in range(3)]
    assert found[:2] == [None, None]
    assert found[2] is not None and found[2].tokens == [40, 41]
