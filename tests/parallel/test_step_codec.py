"""A step that was told is the step that is launched, whatever is in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.engine.ranks.step_codec import decode_step, encode_step
from tokenmill.engine.request import Request
from tokenmill.engine.step import POOLINGS, Admission, SharedPrefix, Step
from tokenmill.kv.moves import Move, Place, Placement
from tokenmill.params import SamplingParams

whole = st.integers(-3, 2**40)
column = st.lists(whole, max_size=6)
rows = st.integers(0, 600)


def params() -> st.SearchStrategy[SamplingParams]:
    plain = {
        "temperature": st.floats(0, 100),
        "top_k": st.integers(0, 2**31),
        "top_p": st.floats(0.001, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "max_tokens": st.integers(20, 2**31 - 1),
        "stop": st.lists(st.text(min_size=1), max_size=2),
        "stop_token_ids": st.lists(rows, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "n": st.integers(1, 4),
        "best_of": st.none() | st.integers(4, 8),
        "length_penalty": st.floats(-20, 20),
        "early_stopping": st.booleans(),
        "logprobs": st.none() | st.integers(0, 1024),
        "prompt_logprobs": st.none() | st.integers(0, 1024),
        "logit_bias": st.none() | st.dictionaries(rows, st.floats(-100, 100), max_size=3),
        "skip_special_tokens": st.booleans(),
    }
    words = {
        "min_tokens": st.integers(0, 20),
        "bad_words": st.lists(st.text(min_size=1), max_size=2),
        "bad_words_ids": st.lists(st.lists(rows, min_size=1, max_size=3), max_size=2),
    }
    forms = {
        "structured": st.sampled_from(
            [{"regex": "a+"}, {"json": {"type": "object"}}, {"choice": ["é", "b"]}, {"json_object": True}]
        )
    }
    beams = {"beam_width": st.integers(4, 64), "n": st.integers(1, 4)}
    some = st.builds(SamplingParams, **plain, **words)
    formed = st.builds(SamplingParams, **plain, **forms)
    return some | formed | st.builds(SamplingParams, **beams)


admissions = st.builds(
    Admission,
    row=rows,
    tokens=st.lists(st.integers(0, 200_000), max_size=40),
    prompt_len=whole,
    params=params(),
    seed=st.integers(-(2**70), 2**70),
    stop_ids=column,
    num_computed=whole,
)
STEPS: dict[str, st.SearchStrategy[Any]] = {
    "number": st.integers(0, 2**62),
    "rows": column,
    "starts": column,
    "counts": column,
    "samples": column,
    "num_singles": whole,
    "admissions": st.lists(admissions, max_size=3),
    "blocks": st.lists(st.tuples(rows, whole, column), max_size=4),
    "moves": st.lists(st.builds(Move, whole, whole, st.sampled_from(Place), st.sampled_from(Place)), max_size=3),
    "placements": st.lists(st.builds(Placement, rows, whole, whole, whole, column.map(tuple)), max_size=3),
    "drafts": st.dictionaries(rows, column, max_size=3),
    "slack": st.dictionaries(rows, whole, max_size=3),
    "drafting": st.booleans(),
    "tree": st.booleans(),
    "chosen": st.lists(st.tuples(rows, whole, whole), max_size=3),
    "told": st.lists(st.tuples(rows, whole, whole), max_size=3),
    "prompt_logprobs": st.dictionaries(rows, st.tuples(whole, whole), max_size=3),
    "pooling": st.dictionaries(rows, st.tuples(st.sampled_from(POOLINGS), whole), max_size=3),
    "masks": st.dictionaries(rows, st.lists(st.binary(max_size=40), max_size=3), max_size=3),
    "adapters": column,
    "in_float32": column,
    "shared": st.none() | st.builds(SharedPrefix, whole, st.lists(rows, max_size=4).map(tuple)),
}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(Step, **STEPS))
def test_every_field_of_a_step_arrives_as_it_was_sent(step: Step) -> None:
    assert decode_step(encode_step(step)) == step


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**62), st.lists(st.none() | st.builds(Step, **STEPS), min_size=1, max_size=4).map(tuple))
def test_a_group_reads_its_own_part(number: int, parts: tuple[Step | None, ...]) -> None:
    message = encode_step(Step(number, parts=parts))
    assert decode_step(message) == Step(number, parts=parts)
    for group, part in enumerate(parts):
        mine = decode_step(message, group)
        assert mine.number == number and mine.parts[group] == part
        assert all(other is None for at, other in enumerate(mine.parts) if at != group)


def test_there_is_no_field_that_nobody_thought_of() -> None:
    pruning = {"pruned", "compactions"}  # refused with ranks (tests/engine/test_pruning.py)
    assert {one.name for one in dataclasses.fields(Step)} == {*STEPS, "parts", "requests", *pruning}


def test_requests_stay_at_home() -> None:
    step = Step(number=3, requests=[Request("secret", [1], SamplingParams(), max_tokens=1, seed=0)])
    message = encode_step(step)
    assert b"secret" not in message and decode_step(message) == Step(number=3)


def test_siblings_share_their_parameters() -> None:
    shared = SamplingParams(n=2, logit_bias={5: 1.5})
    step = Step(number=1, admissions=[Admission(row, [1, 2], 2, shared, row, []) for row in range(2)])
    first, second = decode_step(encode_step(step)).admissions
    assert first.params is second.params and first.params == shared
