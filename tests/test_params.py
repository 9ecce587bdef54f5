"""SamplingParams refuses what cannot be served with one sentence that names the field and the value."""

import copy
import inspect
import math
import pickle
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"temperature": NAN}, "temperature is nan; it must be a number from 0.0 to 100.0"),
        ({"temperature": INF}, "temperature is inf; it must be at least 0.0 and at most 100.0"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be at least 0.0"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": None}, "temperature is None; it must be a number"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0.0 and at most 1.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, r"top_k is -2; it must be a whole number of at least 0 \(0 or -1 turns it off\)"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"min_p": 1.01}, "min_p is 1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"max_tokens": -1}, r"max_tokens is -1; it must be a whole number of at least 1 \(None means"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 17, "max_tokens": 16}, r"min_tokens is 17; .* from 0 to 16 \(it cannot exceed max_tokens\)"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be a whole number from"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"n": 0}, "n is 0; it must be a whole number from 1 to 128"),
        ({"n": 3, "best_of": 2}, r"best_of is 2; .* \(it must be at least n\)"),
        ({"n": 3, "beam_width": 2}, r"beam_width is 2; .* \(it must be at least n\)"),
        ({"beam_width": 4, "repetition_penalty": 1.1}, "beam search cannot be combined with penalties"),
        ({"beam_width": 4, "best_of": 4}, "beam search cannot be combined"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": 5000}, "prompt_logprobs is 5000; it must be a whole number from 0 to 1024"),
        ({"stop": ["ok", ""]}, "stop contains ''; each stop must be a non-empty string"),
        ({"stop": [3]}, "stop contains 3"),
        ({"stop": ["x"] * 65}, "stop has 65 strings; at most 64 are allowed"),
        ({"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
        ({"stop_token_ids": [-4]}, "stop_token_ids entry is -4"),
        ({"logit_bias": {1: NAN}}, "logit_bias value is nan"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias key is -3"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias key is 'a'; it must be a whole number"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias key is 1.5"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; it must map token ids to numbers"),
        ({"bad_words": [""]}, "bad_words contains ''"),
        ({"bad_words": "no"}, "bad_words is 'no'; it must be a list of strings"),
        ({"bad_words_ids": [[]]}, r"bad_words_ids contains \[\]; each must be a non-empty list of token ids"),
        ({"bad_words_ids": [[1, -1]]}, "bad_words_ids entry is -1"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop": 5}, "stop is 5; it must be a list of strings"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; it must be True or False"),
        ({"beam_width": 2, "bad_words": ["x"]}, "beam search cannot be combined"),
        ({"length_penalty": 50.0}, "length_penalty is 50.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_settings_are_refused_with_name_and_value(settings, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "name,hint",
    [
        ("temprature", "did you mean 'temperature'\\?"),
        ("max_token", "did you mean 'max_tokens'\\?"),
        ("colour", "there are .*beam_width"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_one(name, hint):
    with pytest.raises(InvalidRequest, match=f"no sampling parameter '{name}'; {hint}"):
        SamplingParams(**{name: 1})


def test_the_check_of_names_leaves_the_dataclass_as_it_was():
    params = SamplingParams(0.5, 3, seed=7)
    assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]
    assert copy.copy(params) == pickle.loads(pickle.dumps(params)) == replace(params) == params
    assert replace(params, seed=8).seed == 8


JUNK = [None, -1, 3, 2**70, 1.5, NAN, True, "", "x", b"x", [], [None], ["a"], [1.5], [[1]], [[-1]], [["a"]], {}]
JUNK += [{"a": 1}, {1: "x"}, {None: 1}, object(), (1, 2), {1, 2}]


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_no_value_of_any_field_raises_anything_but_invalid_request(name):
    for value in JUNK:
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            assert name in str(error)
            assert str(error).count("; ") == 1


def test_defaults_and_edges_are_accepted():
    SamplingParams()
    SamplingParams(temperature=0, top_p=1, min_p=1.0, max_tokens=None, min_tokens=10_000, seed=-(2**63))
    SamplingParams(beam_width=4, n=4, length_penalty=-1.0, early_stopping=True)
    SamplingParams(logprobs=0, prompt_logprobs=0, n=2, best_of=2)


def test_common_spellings_are_brought_into_one_form():
    params = SamplingParams(stop="end", top_k=-1, logit_bias={"5": 2})
    assert params.stop_strings == ["end"]
    assert params.top_k == 0
    assert params.logit_bias == {5: 2.0}
    assert params.stop_ids == []


def test_greedy_is_zero_temperature():
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_the_widest_of_the_searches_decides_how_many_sequences_run():
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, beam_width=6).num_sequences == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
        {"bad_words_ids": [[1]]},
    ],
    ids=str,
)
def test_only_penalties_and_edits_shape_logits(settings):
    assert SamplingParams(**settings).shapes_logits
    assert not SamplingParams(temperature=0.3, top_k=3, top_p=0.4, min_p=0.1).shapes_logits


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_the_usage_page_lists_every_field_with_its_default(kind):
    page = (Path(__file__).parents[1] / "docs" / "usage.md").read_text()
    for field in fields(kind):
        default = field.default if field.default is not MISSING else field.default_factory()
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        assert f"| `{field.name}` | `{shown}` |" in page
