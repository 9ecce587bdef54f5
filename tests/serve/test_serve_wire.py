"""Messages arrive as they were sent, and what is no message is refused."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill import LLM
from tokenmill.kv.prefix import IdentityChains
from tokenmill.params import SamplingParams
from tokenmill.sampling.records import TokenLogprobs
from tokenmill.serve.engine import wire
from tokenmill.serve.engine.in_flight import InFlightFile
from tokenmill.serve.engine.main import ready_message

tokens = st.integers(0, 2**31 - 1)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1000),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 2**31),
    stop=st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.lists(tokens, max_size=3),
    logit_bias=st.none() | st.dictionaries(tokens, st.floats(-100, 100), max_size=3),
    bad_words_ids=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=2),
    logprobs=st.none() | st.integers(0, 1024),
    n=st.integers(1, 8),
)
sequences = st.builds(
    wire.SubmittedSequence, st.integers(0, 2**63), st.integers(0, 2**63 - 1), st.lists(tokens, max_size=5)
)
submits = st.builds(
    wire.Submit,
    sequences=st.lists(sequences, min_size=1, max_size=3),
    prompt=st.lists(tokens, max_size=50),
    params=params,
    max_tokens=st.integers(1, 2**31),
    stop_ids=st.lists(tokens, max_size=3),
    priority=st.integers(0, 2),
    waited=st.floats(0, 1e6),
    deadline_in=st.none() | st.floats(-1e6, 1e6),
    salt=st.text(),
    pooling=st.sampled_from([None, "mean", "last"]),
)
logprobs = st.floats(max_value=0)
scores = st.builds(TokenLogprobs, tokens, logprobs, tokens, st.lists(st.tuples(tokens, logprobs)))
updates = st.builds(
    wire.SequenceUpdate,
    st.integers(0, 2**63),
    st.lists(tokens, max_size=4),
    st.none() | st.lists(scores, max_size=3),
    st.none() | st.sampled_from(["stop", "error"]),
    st.none() | st.text(),
    prompt_logprobs=st.none() | st.lists(scores, max_size=3),
    pooled=st.none() | st.lists(st.floats(-1, 1), max_size=4),
)
admissions = st.builds(wire.Admitted, st.integers(0, 2**63), st.none() | st.floats(0, 1e9), st.integers(0, 100))


@settings(max_examples=60, deadline=None)
@given(submits)
def test_a_submission_arrives_as_it_was_sent(message: wire.Submit) -> None:
    assert wire.decode_to_engine(wire.encode(message)) == message


@settings(max_examples=60, deadline=None)
@given(st.lists(updates, max_size=5), st.lists(admissions, max_size=3), st.integers(0, 2**40), st.floats(0, 1e9))
def test_a_step_arrives_as_it_was_sent(
    found: list[wire.SequenceUpdate], admitted: list[wire.Admitted], number: int, at: float
) -> None:
    message = wire.StepDone(number, at, 0.1, 1, 2, found, admitted)
    assert wire.decode_from_engine(wire.encode(message)) == message


def test_every_message_has_a_tag_of_its_own() -> None:
    messages = [
        wire.Cancel(1, "cancelled"),
        wire.Ping(True),
        wire.ResetPrefixCache(),
        wire.Stop(),
    ]
    assert [wire.decode_to_engine(wire.encode(one)) for one in messages] == messages
    replies = [
        wire.Loading(1, 2, "weights"),
        wire.Heartbeat(wire.EngineStats(running=2), wire.EngineSnapshot(b"\x00\x03", [])),
        wire.Fatal("ConfigError", "no"),
    ]
    assert [wire.decode_from_engine(wire.encode(one)) for one in replies] == replies


def test_every_sampling_parameter_travels() -> None:
    """A parameter added later must be one that the wire can carry."""
    types = {field.name: field for field in msgspec.inspect.type_info(SamplingParams).fields}
    assert set(types) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([99, 1]), msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(data)
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_engine(data)


def test_logprobs_survive_the_way_there_and_back() -> None:
    found = [TokenLogprobs(3, -0.25, 2, [(1, -0.1), (3, -0.25)])]
    message = wire.StepDone(1, 0.0, 0.0, 0, 0, [wire.SequenceUpdate(1, [3], found)])
    decoded = wire.decode_from_engine(wire.encode(message))
    assert isinstance(decoded, wire.StepDone) and decoded.updates[0].logprobs == found
    assert isinstance(decoded.updates[0].logprobs[0], TokenLogprobs)


def test_log_probabilities_travel_without_the_names_of_their_fields() -> None:
    """There are thousands of them in a second, and both processes pay for every byte."""
    assert wire.encode(TokenLogprobs(3, -0.25, 2, [(1, -0.1)])) == wire.encode((3, -0.25, 2, [(1, -0.1)]))


@given(st.lists(st.integers(0, 2**63), max_size=300), st.lists(st.integers(0, 2**63), max_size=300))
@settings(max_examples=20, deadline=None)
def test_the_flight_record_holds_what_was_written_last(tmp_path_factory, first: list[int], last: list[int]) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("flight") / "record"
    InFlightFile.create(path)
    assert InFlightFile.read(path) == []
    recorder = InFlightFile(path)
    recorder.write(first)
    recorder.write(last)
    assert InFlightFile.read(path) == last
    assert InFlightFile.read(path.with_name("missing")) == []


def test_what_an_engine_that_prunes_calls_its_blocks_is_known_where_requests_are_routed(tiny_model: str) -> None:
    with LLM(tiny_model, load_format="dummy", skip_tokenizer_init=True, device="cpu", kv_pruning="window") as llm:
        ready, kv = ready_message(llm._built), llm._built.engine.scheduler.kv
        assert ready.pruning
        tokens, chain = [3 + at % 90 for at in range(4 * ready.block_size)], list[bytes]()
        IdentityChains(ready.block_size, ready.pruning).extend(chain, "tenant", tokens, 4)
        assert chain == kv.chain("tenant", tokens)
