"""OpenAI's own Python client works against a server unchanged, and gets what the offline API gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import openai
import pytest
from http_server import Server

from tokenmill import LLM, SamplingParams

MODEL = "tiny-chat"
MESSAGES = [{"role": "user", "content": "Tell me about mills."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "grind",
        "description": "Grind something",
        "parameters": {
            "type": "object",
            "properties": {"fine": {"type": "boolean"}},
            "required": ["fine"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline(chat_model: str) -> Iterator[LLM]:
    llm = LLM(chat_model, load_format="dummy", dtype="float64", device="cpu", max_num_seqs=16)
    yield llm
    llm.shutdown()


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("another")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}])
def test_chat_gives_what_the_offline_api_gives_streamed_or_not(
    client: openai.OpenAI, offline: LLM, sampling: dict[str, float]
) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(max_tokens=40, **sampling))[0].outputs[0]
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, **sampling)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage.completion_tokens == len(expected.token_ids)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            **sampling,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(said) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(expected.token_ids)


def test_completions_give_what_the_offline_api_gives(client: openai.OpenAI, offline: LLM) -> None:
    prompts = ["The mill", "A stone and a river", "x"]
    expected = [one.outputs[0].text for one in offline.generate(prompts, SamplingParams(temperature=0, max_tokens=20))]
    whole = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=20)
    assert [choice.text for choice in whole.choices] == expected
    texts = [""] * 3
    for chunk in client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=20, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    ids = offline.get_tokenizer().encode("The mill")
    by_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=20)
    assert by_ids.choices[0].text == expected[0]


def test_several_choices_are_told_apart(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=12, stop_token_ids=[50])
    expected = [one.text for one in offline.chat(MESSAGES, params)[0].outputs]
    assert len(set(expected)) == 3
    asked = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 3, "max_tokens": 12}
    whole = client.chat.completions.create(**asked, extra_body={"stop_token_ids": [50]})
    assert [choice.message.content for choice in whole.choices] == expected
    texts = [""] * 3
    for chunk in client.chat.completions.create(**asked, stream=True, extra_body={"stop_token_ids": [50]}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_logprobs_are_those_of_the_offline_api(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8, logprobs=3))[0].outputs[0]
    asked = {
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    streamed = [
        one
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert whole == streamed
    assert [one.logprob for one in whole] == pytest.approx(
        [table[token].logprob for token, table in zip(expected.token_ids, expected.logprobs)]
    )
    for one in whole:
        best = [top.logprob for top in one.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True) and best[0] == one.logprob
        assert bytes(one.bytes)
    legacy = client.completions.create(model=MODEL, prompt="The mill", max_tokens=0, echo=True, logprobs=2).choices[0]
    assert legacy.text == "The mill" and "".join(legacy.logprobs.tokens) == "The mill"
    assert legacy.logprobs.token_logprobs[0] is None
    assert all(value < 0 and math.isfinite(value) for value in legacy.logprobs.token_logprobs[1:])


def test_token_ids_are_told_on_request(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].token_ids
    asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    more = {"return_token_ids": True}
    assert client.chat.completions.create(**asked, extra_body=more).choices[0].model_extra["token_ids"] == expected
    chunks = client.chat.completions.create(**asked, extra_body=more, stream=True)
    assert [id for one in chunks for id in one.choices[0].model_extra.get("token_ids", [])] == expected


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="The mill", temperature=0, max_tokens=30).choices[0].text
    stop = text[10:12]
    asked = {"model": MODEL, "prompt": "The mill", "temperature": 0, "max_tokens": 30, "stop": [stop]}
    cut = client.completions.create(**asked).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    assert cut.model_extra["stop_reason"] == stop
    assert "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True)) == cut.text


def test_bias_and_penalties_reach_the_engine(client: openai.OpenAI) -> None:
    forced = client.completions.create(model=MODEL, prompt="a", max_tokens=5, temperature=0, logit_bias={"70": 100})
    assert len(set(forced.choices[0].text)) == 1
    varied = client.completions.create(
        model=MODEL,
        prompt="a",
        max_tokens=5,
        temperature=0,
        logit_bias={"70": 100, "71": 99, "72": 98},
        frequency_penalty=2,
    )
    assert len(set(varied.choices[0].text)) > 1


def test_usage_tells_what_the_cache_supplied(client: openai.OpenAI) -> None:
    prompt = "A prompt that is long enough to fill several blocks of the cache, said twice."
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    second = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 64
    salted = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "x"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_answers_keep_to_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"wind": {"type": "boolean"}, "stones": {"enum": [1, 2]}},
        "required": ["wind", "stones"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "mill", "schema": schema, "strict": True}}
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, response_format=format)
    answer = json.loads(whole.choices[0].message.content)
    assert answer["wind"] in (True, False) and answer["stones"] in (1, 2) and len(answer) == 2
    for form, allowed in (
        ({"choice": ["water", "wind"]}, {"water", "wind"}),
        ({"regex": "a{2}b"}, {"aab"}),
        ({"grammar": 'start: "x" | "yy"'}, {"x", "yy"}),
        ({"structured_outputs": {"choice": ["one"]}}, {"one"}),
    ):
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=form)
        assert whole.choices[0].message.content in allowed


def test_a_required_tool_is_called_streamed_or_not(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "grind"}}):
        asked = {
            "model": MODEL,
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": 4,
        }
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        [call] = whole.message.tool_calls
        assert call.function.name == "grind"
        assert json.loads(call.function.arguments)["fine"] in (True, False)
        parts = [
            part
            for chunk in client.chat.completions.create(**asked, stream=True)
            for part in chunk.choices[0].delta.tool_calls or []
        ]
        assert parts[0].function.name == "grind" and parts[0].id
        assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_a_conversation_with_calls_can_go_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "grind", "arguments": '{"fine": true}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "flour"}]},
    ]
    whole = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=3)
    assert whole.usage.completion_tokens <= 3


def test_responses_say_what_chat_says(client: openai.OpenAI, offline: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    expected = offline.chat(messages, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text
    asked = {"model": MODEL, "input": MESSAGES, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    assert whole.output_text == expected
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected
    form = {"format": {"type": "json_schema", "name": "word", "schema": {"enum": ["flour"]}}}
    with client.responses.stream(model=MODEL, input="What?", text=form) as stream:
        final = stream.get_final_response()
    assert final.output_text == '"flour"' and final.status == "completed"


def test_responses_call_functions(client: openai.OpenAI) -> None:
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    asked = {"model": MODEL, "input": "Grind!", "tools": [tool], "tool_choice": {"type": "function", "name": "grind"}}
    [item] = client.responses.create(**asked).output
    assert item.type == "function_call" and item.name == "grind" and "fine" in json.loads(item.arguments)
    events = list(client.responses.create(**asked, stream=True))
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    [done] = [e.item for e in events if e.type == "response.output_item.done"]
    assert done.arguments == arguments and "fine" in json.loads(arguments)
    again = [
        {"role": "user", "content": "Grind!"},
        {"type": "function_call", "call_id": item.call_id, "name": "grind", "arguments": item.arguments},
        {"type": "function_call_output", "call_id": item.call_id, "output": "flour"},
    ]
    assert client.responses.create(model=MODEL, input=again, max_output_tokens=2).usage.output_tokens <= 2


def test_embeddings_are_unit_vectors(client: openai.OpenAI) -> None:
    texts = ["a mill", "a mill", "a river"]
    found = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64 and decodes it
    vectors = [one.embedding for one in found.data]
    assert len(vectors[0]) == 32 and math.fsum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-4)
    assert vectors[0] == pytest.approx(vectors[1]) and vectors[0] != pytest.approx(vectors[2])
    plain = client.embeddings.create(model=MODEL, input="a mill", encoding_format="float").data[0].embedding
    assert plain == pytest.approx(vectors[0], abs=1e-6)
    short = client.embeddings.create(model=MODEL, input="a mill", dimensions=4).data[0].embedding
    assert len(short) == 4 and math.fsum(x * x for x in short) == pytest.approx(1, abs=1e-4)


def test_refusals_are_the_clients_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature" and refused.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError, match="did you mean 'max_tokens'"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"max_tokenz": 3})
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="the prompt has") as refused:
        client.completions.create(model=MODEL, prompt="x" * 5000)
    assert refused.value.code == "context_length_exceeded"


def test_what_has_no_effect_is_listed(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, user="somebody", store=True
    )
    assert raw.headers["x-tokenmill-ignored"] == "store, user"
