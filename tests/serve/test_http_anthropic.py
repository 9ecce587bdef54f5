"""Anthropic's own Python client works against a server unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from http_server import Server

from tokenmill import LLM, SamplingParams

MODEL = "tiny-chat"
MESSAGES = [{"role": "user", "content": "Tell me about mills."}]
GREEDY = {"temperature": 0}  # newer clients do not have it among their arguments
TOOL = {
    "name": "grind",
    "description": "Grind something",
    "input_schema": {
        "type": "object",
        "properties": {"fine": {"type": "boolean"}},
        "required": ["fine"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline(chat_model: str) -> Iterator[LLM]:
    llm = LLM(chat_model, load_format="dummy", dtype="float64", device="cpu", max_num_seqs=16)
    yield llm
    llm.shutdown()


def test_messages_give_what_the_offline_api_gives_streamed_or_not(client: anthropic.Anthropic, offline: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    expected = offline.chat(messages, SamplingParams(temperature=0, max_tokens=25))[0].outputs[0]
    asked = {"model": MODEL, "messages": MESSAGES, "system": "Be brief.", "max_tokens": 25, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    assert [block.text for block in whole.content] == [expected.text]
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 25
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == expected.text and len(pieces) > 3
    assert final.content[0].text == expected.text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 25
    seen = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert seen == client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.").input_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30, "extra_body": GREEDY}
    text = client.messages.create(**asked).content[0].text
    stop = text[8:10]
    cut = client.messages.create(**asked, stop_sequences=[stop])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop
    assert cut.content[0].text == text[: text.index(stop)]


def test_the_beginning_of_an_answer_can_be_given(client: anthropic.Anthropic) -> None:
    asked = {"model": MODEL, "max_tokens": 10, "system": "Be brief.", "extra_body": GREEDY}
    whole = client.messages.create(**asked, messages=MESSAGES).content[0].text
    assert whole[:2].isascii()  # bytes that are no text could not be given back
    begun = [*MESSAGES, {"role": "assistant", "content": whole[:2]}]
    assert client.messages.create(**asked, messages=begun).content[0].text.startswith(whole[2:9])


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "grind"}]
)
def test_a_required_tool_is_used_streamed_or_not(client: anthropic.Anthropic, choice: dict[str, object]) -> None:
    asked = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 100,
        "extra_body": {"seed": 1},
    }
    whole = client.messages.create(**asked)
    [block] = whole.content
    assert whole.stop_reason == "tool_use" and block.name == "grind" and block.input["fine"] in (True, False)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [one.input for one in final.content] == [block.input] and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "flour"}
    again = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(model=MODEL, messages=again, tools=[TOOL], max_tokens=2)
    assert last.usage.output_tokens <= 2


def test_answers_keep_to_a_schema(client: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": ["flour"]}}}
    whole = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=20, output_config=form)
    assert whole.content[0].text == '"flour"' and whole.stop_reason == "end_turn"


def test_refusals_are_the_clients_own_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="top_p is 7") as refused:
        client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5, extra_body={"top_p": 7})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", messages=MESSAGES, max_tokens=5)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=5)
