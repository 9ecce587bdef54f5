"""A bad request is refused with one sentence that says what is wrong, and the engine goes on serving the others."""

from __future__ import annotations

from typing import Any

import pytest
from api_engines import GREEDY, PROMPT, assert_idle, ids, open_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest

# name -> (prompt, sampling params, words that the message must contain)
REFUSED_PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "empty list of ids": ([[]], ["prompt is empty", "at least one token"]),
    "over the limit": ([[7] * 512], ["512 tokens", "shorten it", "max_model_len"]),
    "far over the limit": ([[7] * 100_000], ["100000 tokens", "512"]),
    "id beyond the vocabulary": ([[5, 128]], ["token id 128", "vocabulary of 128"]),
    "huge id": ([[2**70]], [str(2**70), "vocabulary of 128"]),
    "negative id": ([[5, -1]], ["token id -1", "vocabulary"]),
    "a number": (5.5, ["text or a list of token ids", "float 5.5"]),
    "nothing": (None, ["text or a list of token ids", "NoneType"]),
    "ids that are no whole numbers": ([[5, 6.0]], ["text or a list of token ids"]),
    "ids that are truth values": ([[True, False]], ["text or a list of token ids"]),
    "bytes": (b"hello", ["text or a list of token ids", "bytes"]),
    "a mapping without a prompt": ({"text": "hello"}, ["'prompt' or 'prompt_token_ids'", "text"]),
    "a mapping with nothing in it": ({"prompt_token_ids": None}, ["text or a list of token ids"]),
    "text without a tokenizer": ("hello", ["needs a tokenizer", "skip_tokenizer_init", "prompt_token_ids"]),
}

REFUSED_PARAMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "NaN temperature": ({"temperature": float("nan")}, ["temperature is nan"]),
    "infinite temperature": ({"temperature": float("inf")}, ["temperature is inf", "at most 100"]),
    "negative temperature": ({"temperature": -1}, ["temperature is -1", "at least 0"]),
    "temperature as text": ({"temperature": "0.7"}, ["temperature is '0.7'", "number"]),
    "a number no float can hold": ({"temperature": 10**400}, ["temperature", "at most 100"]),
    "top_p of nothing": ({"top_p": 0}, ["top_p is 0", "above 0"]),
    "no tokens": ({"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
    "max_tokens as text": ({"max_tokens": "16"}, ["max_tokens is '16'", "whole number"]),
    "seed as float": ({"seed": 1.5}, ["seed is 1.5", "whole number"]),
    "n as truth value": ({"n": True}, ["n is True", "whole number"]),
    "stop as number": ({"stop": 5}, ["stop is 5", "list of strings"]),
    "empty stop": ({"stop": [""]}, ["stop contains ''", "non-empty"]),
    "stop_token_ids as text": ({"stop_token_ids": "5"}, ["stop_token_ids is '5'", "list"]),
    "logit_bias as list": ({"logit_bias": [1]}, ["logit_bias is [1]", "map"]),
    "logit_bias of NaN": ({"logit_bias": {1: float("nan")}}, ["logit_bias value is nan"]),
    "a numeral too long to read": ({"logit_bias": {"9" * 5000: 1.0}}, ["logit_bias key", "whole number"]),
    "min above max": ({"min_tokens": 20, "max_tokens": 10}, ["min_tokens is 20", "max_tokens"]),
    "an unknown type": ({"ignore_eos": "yes"}, ["ignore_eos is 'yes'", "True or False"]),
}

# Only the engine can refuse these: it knows the vocabulary, the tokenizer and the length.
REFUSED_BY_ENGINE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "stop token beyond the vocabulary": ({"stop_token_ids": [128]}, ["stop_token_ids", "token 128", "128"]),
    "bias beyond the vocabulary": ({"logit_bias": {4000: 1.0}}, ["logit_bias", "token 4000", "128"]),
    "stop string without a tokenizer": ({"stop": "x"}, ["stop string needs a tokenizer", "skip_tokenizer_init"]),
    "bad words without a tokenizer": ({"bad_words": ["x"]}, ["bad_words needs a tokenizer", "skip_tokenizer_init"]),
    "min_tokens beyond the room": ({"min_tokens": 510, "max_tokens": None}, ["min_tokens is 510", "room for 506"]),
    "beams wider than the vocabulary": ({"beam_width": 64}, ["beam_width 64", "vocabulary of 128"]),
    "beams with logprobs": ({"beam_width": 2, "logprobs": 1}, ["beam search", "logprobs unset"]),
}

REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown priority": ({"priority": "urgent"}, ["priority is 'urgent'", "realtime", "batch"]),
    "priority out of range": ({"priority": 7}, ["priority is 7", "0, 1, 2"]),
    "timeout of nothing": ({"timeout": 0}, ["timeout is 0", "positive"]),
    "NaN timeout": ({"timeout": float("nan")}, ["timeout is nan", "positive"]),
    "timeout as text": ({"timeout": "5s"}, ["timeout is '5s'", "positive number of seconds"]),
    "salt that is no text": ({"cache_salt": None}, ["cache_salt", "must be text"]),
    "salt that cannot be encoded": ({"cache_salt": "\ud800"}, ["cache_salt", "must be text"]),
}


@pytest.fixture(autouse=True)
def engine_goes_on(tiny: LLM):
    """After every refusal the engine is idle and answers as before."""
    before = ids(tiny, PROMPT)
    yield
    assert ids(tiny, PROMPT) == before
    tiny.reset_prefix_cache()
    assert_idle(tiny._processor.engine)


def refusal(call: Any, words: list[str]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


@pytest.mark.parametrize("name", REFUSED_PROMPTS)
def test_a_bad_prompt_is_refused_with_its_cause(tiny: LLM, name: str) -> None:
    prompt, words = REFUSED_PROMPTS[name]
    refusal(lambda: tiny.generate(prompt, GREEDY, use_tqdm=False), words)


@pytest.mark.parametrize("name", REFUSED_PARAMS)
def test_bad_sampling_params_are_refused_with_field_and_value(name: str) -> None:
    fields, words = REFUSED_PARAMS[name]
    refusal(lambda: SamplingParams(**fields), words)


@pytest.mark.parametrize("name", REFUSED_BY_ENGINE)
def test_sampling_params_that_this_model_cannot_serve_are_refused(tiny: LLM, name: str) -> None:
    fields, words = REFUSED_BY_ENGINE[name]
    refusal(lambda: tiny.generate([PROMPT], SamplingParams(**fields), use_tqdm=False), words)


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_bad_request_options_are_refused(tiny: LLM, name: str) -> None:
    options, words = REFUSED_OPTIONS[name]
    refusal(lambda: tiny.generate([PROMPT], GREEDY, use_tqdm=False, **options), words)


def test_a_field_spoiled_after_construction_is_refused(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.5)
    params.temperature = float("nan")
    refusal(lambda: tiny.generate([PROMPT], params, use_tqdm=False), ["temperature is nan"])


def test_another_number_of_sampling_params_than_prompts_is_refused(tiny: LLM) -> None:
    words = ["3 prompts", "2 sampling_params", "give one, or as many"]
    refusal(lambda: tiny.generate([PROMPT] * 3, [GREEDY] * 2, use_tqdm=False), words)


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.7, "greedy", [{"temperature": 0}]])
def test_sampling_params_of_another_type_are_refused(tiny: LLM, params: Any) -> None:
    refusal(lambda: tiny.generate([PROMPT], params, use_tqdm=False), ["SamplingParams"])


def test_one_bad_prompt_among_good_ones_runs_none_of_them(tiny: LLM) -> None:
    steps = tiny._processor.engine.scheduler.stats.steps
    refusal(lambda: tiny.generate([PROMPT, [5, 999], PROMPT], GREEDY, use_tqdm=False), ["token id 999"])
    assert tiny._processor.engine.scheduler.stats.steps == steps


@pytest.mark.parametrize("id", ["", 5, "a/1"])
def test_a_request_id_that_could_clash_is_refused(tiny: LLM, id: Any) -> None:
    refusal(lambda: next(tiny.stream(PROMPT, GREEDY, request_id=id)), ["request_id", "string"])


def test_a_request_id_that_is_running_is_refused_and_free_again_afterwards(tiny: LLM) -> None:
    first, second = (tiny.stream(PROMPT, GREEDY, request_id="mine") for _ in range(2))
    next(first)
    refusal(lambda: next(second), ["'mine' is already running"])
    expected = list(first)[-1].outputs[0].token_ids
    again = list(tiny.stream(PROMPT, GREEDY, request_id="mine"))
    assert again[-1].request_id == "mine" and again[-1].outputs[0].token_ids == expected


def test_ids_that_the_engine_chooses_avoid_those_of_users(tiny: LLM) -> None:
    number = tiny._processor._count + 1
    stream = tiny.stream(PROMPT, GREEDY, request_id=f"r{number}")
    next(stream)
    other = tiny.generate([PROMPT], GREEDY, use_tqdm=False)[0]
    assert other.request_id == f"r{number + 1}"
    assert list(stream)[-1].outputs[0].token_ids == other.outputs[0].token_ids


def test_an_empty_or_overlong_text_prompt_is_refused(texter: LLM) -> None:
    refusal(lambda: texter.generate("", GREEDY, use_tqdm=False), ["prompt is empty"])
    refusal(lambda: texter.generate("x" * 600, GREEDY, use_tqdm=False), ["600 tokens", "512", "shorten it"])
    refusal(lambda: texter.generate("x" * 10_000_000, GREEDY, use_tqdm=False), ["10000000", "shorten it"])
    refusal(lambda: texter.generate("\ud800", GREEDY, use_tqdm=False), ["not valid Unicode"])
    assert len(ids(texter, "xyz")) == GREEDY.max_tokens


def test_stop_strings_with_beams_are_refused(texter: LLM) -> None:
    params = SamplingParams(beam_width=2, stop="x")
    refusal(lambda: texter.generate("hello", params, use_tqdm=False), ["beam search", "leave stop"])


@pytest.mark.parametrize("messages", ["hello", [{"content": "no role"}], [{"role": "user", "content": 5}], [[]]])
def test_a_conversation_that_is_none_is_refused(texter: LLM, messages: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    refusal(lambda: texter.chat(messages, GREEDY, use_tqdm=False, chat_template=template), ["message"])


def test_a_chat_without_a_template_or_tokenizer_is_refused(tiny: LLM, texter: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    refusal(lambda: texter.chat(hello, GREEDY, use_tqdm=False), ["no chat template", "chat_template"])
    refusal(lambda: tiny.chat(hello, GREEDY, use_tqdm=False), ["chat needs a tokenizer", "skip_tokenizer_init"])


def test_a_prompt_at_the_limit_gets_the_room_that_is_left(tiny_model: str) -> None:
    with open_tiny(tiny_model, max_model_len=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        output = llm.generate([[7] * 31], params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 1 and output.finish_reason == "length" and output.stop_reason is None
        for asked, why in ((8, "max_model_len"), (2, None), (1, None)):  # who asked for more is told what it was
            params = SamplingParams(temperature=0, max_tokens=asked, ignore_eos=True)
            output = llm.generate([[7] * 30], params, use_tqdm=False)[0].outputs[0]
            assert (len(output.token_ids), output.finish_reason) == (min(asked, 2), "length")
            assert output.stop_reason == why
        refusal(lambda: llm.generate([[7] * 32], params, use_tqdm=False), ["32 tokens", "max_model_len"])
