"""Streamed text equals the text of the whole output, and stops where a stop string appears."""

import codecs
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenmill.model.detokenizer import IncrementalDetokenizer, StopStrings


def any_ids(tokenizer, draw):
    """Ids of which many are single bytes, so that characters fall apart often."""
    pieces = [id for id in range(1000) if len(tokenizer.pieces.bytes_of(id)) == 1][:300]
    one = st.one_of(st.integers(0, tokenizer.vocab_size + 3), st.sampled_from(pieces))
    return draw(st.lists(one, max_size=12))


def complete(text_bytes: bytes) -> str:
    """The characters of a prompt that are certain, whatever follows."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text_bytes)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_deltas_join_to_the_text_of_the_whole_output(request, kind, data, skip):
    tokenizer = request.getfixturevalue(kind)
    prompt, output = any_ids(tokenizer, data.draw), any_ids(tokenizer, data.draw)
    stream = IncrementalDetokenizer(tokenizer, prompt, skip)
    deltas = [stream.push([id]) for id in output]
    text = "".join(deltas) + stream.flush()
    whole = tokenizer.decode(prompt + output, skip)
    visible = [id for id in prompt if not (skip and tokenizer.is_special(id))]
    shown = complete(b"".join(map(tokenizer.pieces.bytes_of, visible)))
    if tokenizer.pieces.drops_first_space:
        shown = shown.removeprefix(" ")
    assert shown + text == whole


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), data=st.data())
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_delta_splits_a_character_however_tokens_arrive(request, kind, text, data):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(tokenizer.decode(ids, skip_special_tokens=False) == text)  # a few bytes have no token in one of them
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    deltas = []
    while ids:
        count = data.draw(st.integers(1, 4))
        deltas.append(stream.push(ids[:count]))
        ids = ids[count:]
    assert "".join(deltas) == text  # and nothing was left to flush
    assert stream.flush() == ""


def test_an_emoji_appears_only_once_it_is_whole(byte_level):
    ids = byte_level.encode("\N{GRINNING FACE}")
    assert len(ids) > 1
    stream = IncrementalDetokenizer(byte_level)
    assert [stream.push([id]) for id in ids] == [""] * (len(ids) - 1) + ["\N{GRINNING FACE}"]


def test_unfinished_bytes_come_out_as_a_replacement_at_the_end(byte_level):
    stream = IncrementalDetokenizer(byte_level)
    assert stream.push(byte_level.encode("\N{GRINNING FACE}")[:1]) == ""
    assert stream.flush() == "\ufffd"


def test_the_space_before_a_first_word_depends_on_the_prompt(byte_fallback):
    word = byte_fallback.encode("the", add_special_tokens=False)
    assert IncrementalDetokenizer(byte_fallback, []).push(word) == "the"
    assert IncrementalDetokenizer(byte_fallback, [byte_fallback.bos_id]).push(word) == "the"
    assert IncrementalDetokenizer(byte_fallback, word).push(word) == " the"


def test_the_cost_of_a_token_does_not_grow_with_the_output(byte_level):
    stream = IncrementalDetokenizer(byte_level)
    ids = byte_level.encode("The quick brown fox jumps over the lazy dog. ") * 20

    def cost(repeats):
        start = time.process_time()
        for _ in range(repeats):
            for id in ids:
                stream.push([id])
        return (time.process_time() - start) / repeats

    cost(5)
    early = min(cost(5) for _ in range(3))
    cost(200)
    late = min(cost(5) for _ in range(3))
    assert late < 5 * early


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first moment at which the text ends with a stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


letters = st.text("ab", max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


@settings(max_examples=600, deadline=None)
@given(text=letters, stops=stop_lists, include=st.booleans(), data=st.data())
def test_stop_strings_agree_with_a_naive_search_however_text_arrives(text, stops, include, data):
    matcher = StopStrings(stops, include)
    shown, rest = "", text
    while rest:
        count = data.draw(st.integers(1, 5))
        shown += matcher.push(rest[:count])
        rest = rest[count:]
    shown += matcher.flush()
    assert (shown, matcher.match) == naive(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(text=letters, stops=stop_lists)
def test_only_text_that_may_begin_a_stop_string_is_held_back(text, stops):
    matcher = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, start=1):
        shown += matcher.push(character)
        if matcher.match is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_follows_a_match():
    matcher = StopStrings(["END"])
    assert matcher.push("abEN") == "ab"
    assert matcher.push("Dcd") == "" and matcher.match == "END"
    assert matcher.push("more") == "" and matcher.flush() == ""


def test_long_stop_strings_do_not_make_matching_slow():
    matcher = StopStrings(["a" * 5000 + "b"] * 4)
    start = time.process_time()
    matcher.push("a" * 20_000)
    assert time.process_time() - start < 2
